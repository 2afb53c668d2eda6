"""Facts about this machine: cores, caches and memory."""
