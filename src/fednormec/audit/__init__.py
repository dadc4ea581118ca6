"""Attacks on our own privacy: `canaries` play against a mechanism or a training, `checks` test its parts, `evidence`
turns what they saw into a lower bound on ε.
May use: core, algorithms, problems, privacy, engine, config, runs.
"""
