"""Guarantees: what the paper prints, what holds, and which settings make it small."""
