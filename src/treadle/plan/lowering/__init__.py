"""Graphs to plans: how a device makes the ops of ``models/ops.py``."""
