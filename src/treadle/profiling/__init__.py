"""What this machine can do: peaks, trials of kernels, and the report of ``treadle doctor``."""
