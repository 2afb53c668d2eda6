"""NVIDIA GPUs: plans of the CPU's lowering, with kernels that run in blocks of threads.

::

    device.py        Cuda: the device; weights uploaded once, a plan as a graph of launches
    driver.py        Driver: the interface to one GPU
    libcuda.py       CudaDriver: NVIDIA's driver behind this interface
    library.py       the driver's functions through ctypes
    ptx.py           compiles a kernel to PTX
    launch_args.py   the entry of a GPU kernel: which thread or block runs which items
    kernel_table.py  which steps of a plan get a GPU kernel
    kernels/         these GPU kernels
    facts.py         the GPU's properties for ``treadle doctor``, and its copy rate
"""
