"""Readers and writers of model files: metadata and tensors of memory-mapped, uncopied files."""
