"""The sum of all members' vectors for a server that sees none of them, as pure values on bytes. Read `terms` (what is
agreed on beforehand), `member` (what a member answers, refuses and is promised) and `aggregator` (the server's side).
May use: errors.
"""
