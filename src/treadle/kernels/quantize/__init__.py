"""Searches for the scales of quantised blocks; their numpy twins are in ``formats/``."""
