"""Conversations: templates that write prompts, and parsers that read answers."""
