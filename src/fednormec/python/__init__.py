"""What the command line does, for values of a Python program: `training` and `sweeping` leave run folders, `comparing`
shows them; `values` says what a folder's config has of a problem and a method, and knows them again.
May use: core, engine, privacy, config, runs, results, sweeps.
"""
