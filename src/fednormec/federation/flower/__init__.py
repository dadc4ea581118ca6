"""Flower as the transport: a Grid carries what HTTPS carries elsewhere, and a gateway keeps a client's data with its
owner. Only `server_app`, `client_app` and `records` import flwr, and only its public names.
"""
