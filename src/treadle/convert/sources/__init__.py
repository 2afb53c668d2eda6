"""Sources of a model's tensors, and how tensors are derived from those in the files."""
