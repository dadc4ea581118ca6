"""Configs in strict TOML, and the objects of a run: `schema` reads and checks against `signatures`, `datasets` and
`assemble` build what `settings` says; `constructors` has all names, `listing` their settings, `keeping` what stays.
May use: core, algorithms, problems, data, privacy, engine.
"""
