"""Devices that run plans: one engine, several kinds of hardware.

::

    protocol.py    Device: the interface (memory, weights, copy, plan, ready, run)
    registry.py    opens a device by its name: ``cpu``, ``cuda:1``, ``wgpu``
    cpu/           threads that run compiled kernels in this process's memory
    cuda/          NVIDIA GPUs: kernels as PTX, a plan as a graph of launches
    wgpu/          any GPU through WebGPU: kernels as WGSL shaders
"""
