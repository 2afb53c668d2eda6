"""Searches for the scales of quantised blocks; their twins are in ``formats/``."""
