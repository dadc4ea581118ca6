"""Concepts as pure values: problem, local update, bound, algorithm, participation; and what they compute with:
vectors, kernels, randomness, stages of a profile. Nothing here knows a method, a data set or an engine by name.
May use: errors.
"""
