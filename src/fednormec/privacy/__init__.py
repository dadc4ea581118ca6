"""Privacy: what is added to the sum, and (next) what it proves."""
