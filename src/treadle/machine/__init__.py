"""What this machine has: cores, caches and memory."""
