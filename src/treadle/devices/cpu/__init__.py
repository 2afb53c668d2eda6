"""The CPU: threads, the compiled step loop, and memory that files are mapped to."""
