"""Methods, a family on ten recursions, from error feedback and averaging to personal models. `methods` is the table of
names, `faults` makes clients misbehave on purpose.
May use: core.
"""
