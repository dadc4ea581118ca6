"""Run folders read back: `reading` takes what can be read, `groups` puts seeds together, `labels` names differences;
`compare`, `curves` and `report` show them.
May use: privacy, engine, config, runs.
"""
