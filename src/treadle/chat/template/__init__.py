"""From messages to a prompt: chat templates of model files, rendered in a sandbox."""
