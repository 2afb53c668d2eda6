"""Small things that every package may use; none knows of models."""
