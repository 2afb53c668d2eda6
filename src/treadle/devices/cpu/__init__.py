"""The CPU device: threads, the compiled step loop, and memory mapped from files."""
