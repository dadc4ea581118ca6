"""Configs in strict TOML, and the objects of a run: `schema` reads and checks, `settings` has the sections, `datasets`
deals out the data, `assemble` builds problem, algorithm, participation and privacy.
May use: core, algorithms, problems, data, privacy, engine.
"""
