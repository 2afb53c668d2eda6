"""Families of models: a row for each ``model_type`` of transformers."""
