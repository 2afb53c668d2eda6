"""A model whose layers are split over several engines: each computes some, in turn."""
