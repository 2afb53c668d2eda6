"""Where the tensors of a model come from, and how they are derived from a file's own."""
