"""From other checkpoints to GGUF: what is read (one file a source), and what is written."""
