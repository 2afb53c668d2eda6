"""The CPU device: threads, the compiled step loop, and memory mapped from files.

Plans come from ``plan/lowering/ops.py``.
"""
