"""Threads, the compiled step loop, and what this machine can do."""
