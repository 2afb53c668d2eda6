"""Graphs whose layers run several times."""
