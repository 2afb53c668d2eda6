"""Graphics processors: plans of the CPU's lowering, whose kernels run in blocks of threads."""
