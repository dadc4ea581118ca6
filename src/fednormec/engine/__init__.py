"""Rounds one after another (`simulation`, `round`), what is decided before the first (`planning`, `checking`), and the
clients' side of a round (`clients`) with the places that ship with the package: `threads` and `ray_cluster`.
May use: core, problems, secagg, privacy.
"""
