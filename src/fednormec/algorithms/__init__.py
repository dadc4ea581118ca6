"""Three recursions carry the family: error feedback, averaging, control variates."""
