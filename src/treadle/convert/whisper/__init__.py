"""Whisper models in the files of several programs, with one set of names and keys."""
