"""Run folders read back: `reading` takes what can be read, `groups` puts seeds together, `report` and others show them;
and their models: `loading` builds one again, `evaluating`, `predicting` and `exporting` put it to use.
May use: core, problems, data, privacy, engine, config, runs.
"""
