"""A model on several engines or machines."""
