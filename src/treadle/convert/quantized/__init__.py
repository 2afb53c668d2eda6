"""Checkpoints that are quantised already: their formats, kept or unpacked."""
