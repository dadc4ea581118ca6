"""Runs from config to folder: `runner` trains, `folder` and `checkpoint` store, `resume` continues, `records` and
`summary` say what happened; observers watch (`progress`, `tensorboard`).
May use: core, problems, data, privacy, engine, config, theory.
"""
