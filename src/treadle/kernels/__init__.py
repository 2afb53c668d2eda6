"""The kernels: specs, the functions that emit them, and their numpy twins."""
