"""KV pages and sessions in files."""
