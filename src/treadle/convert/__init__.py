"""Conversion of other checkpoints to GGUF: readers (one file per source kind) and the writer."""
