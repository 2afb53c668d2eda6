"""GPU kernels with one block of threads per item."""
