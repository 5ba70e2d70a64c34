"""Clients: their connections, bodies, answers."""
