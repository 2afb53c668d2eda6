"""WGSL kernels, printed from the specs of a plan's steps; ``devices/wgpu/device.py`` runs them.

There is one file for each group of kernels, as in ``kernels/``; ``dispatch.py`` has the table.
"""
