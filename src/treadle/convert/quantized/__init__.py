"""Checkpoints that are already quantised: their formats are kept or unpacked."""
