"""Model files: from bytes on disk to metadata and tensors, mapped and never copied."""
