"""Chat templates that write prompts, and parsers of model output."""
