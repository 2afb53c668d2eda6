"""Protocols of other servers: a file for each family of endpoints."""
