"""Client-level privacy as one frozen mechanism: who is drawn, which noise, what it costs (accounting, ledger), and
what may be said about it (statement).
May use: core.
"""
