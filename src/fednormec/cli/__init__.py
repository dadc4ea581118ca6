"""The command line: one file per command with its help text, and `main`, which turns a user's mistake into a sentence
and an exit code.
May use: every other room.
"""
