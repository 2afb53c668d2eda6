"""Towers and projectors of pictures and sound: rows of patches in, rows of states out."""
