"""Methods, a family on three recursions: error feedback, averaging, control variates. `methods` is the table
of names, `faults` makes clients misbehave on purpose.
May use: core.
"""
