"""Model families: a row for each ``model_type`` of transformers."""
