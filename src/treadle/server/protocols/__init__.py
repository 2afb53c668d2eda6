"""Protocols of other servers: a file or folder for each family of endpoints."""
