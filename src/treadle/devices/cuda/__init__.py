"""NVIDIA GPUs: plans of the CPU's lowering, with kernels that run in blocks of threads."""
