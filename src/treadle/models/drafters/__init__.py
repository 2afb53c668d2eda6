"""Graphs of drafters that read the states of another model."""
