"""Lowering from graphs to plans: the device implementations of the ops of ``models/ops.py``."""
