"""Clients that are other people's machines: Flower carries the messages, all else is ours. Read `server` (who is asked,
what is taken), `client` (what one client answers) and `codec` (what crosses between them)."""
