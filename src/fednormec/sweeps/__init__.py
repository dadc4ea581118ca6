"""Sweeps over many runs: `grid` lists them, `pool` runs them in worker processes, `ranking` orders them, `price`
says what the choice cost; `paper` is the grid of the paper.
May use: core, privacy, engine, config, runs, results.
"""
