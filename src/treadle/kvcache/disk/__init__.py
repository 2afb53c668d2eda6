"""Pages and sessions in files."""
