"""Kernels whose items are done by a block of threads each."""
