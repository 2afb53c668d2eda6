"""HTTP layer: bodies, errors, connections and the log."""
