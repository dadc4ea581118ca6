"""Clients that are other people's machines. Read `wire` (who is asked, what is taken), `client` (what one client
answers) and `messages` (what crosses between them).
May use: core, data, secagg, privacy, engine, config, runs, results.
"""
