"""Quantise a model file: choose a format for each tensor (``plan``) and write the file (``write``)."""
