"""Privacy: what is asked (`Privacy`), what runs (`Mechanism`), what it costs (accounting, ledger), what may be said."""
