"""Methods, a family on six recursions: error feedback, residuals, error control, centred feedback, averaging, control
variates. `methods` is the table of names, `faults` makes clients misbehave on purpose.
May use: core.
"""
