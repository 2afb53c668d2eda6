"""HTTP: bodies, errors, connections and the log."""
