"""Chat templates of model files: messages to prompts, rendered in a sandbox."""
