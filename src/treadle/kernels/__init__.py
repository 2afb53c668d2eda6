"""The kernels, each beside its numpy twin: specs, and the functions that emit them."""
