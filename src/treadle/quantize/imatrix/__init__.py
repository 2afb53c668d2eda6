"""Importance matrices: how much each input of a weight matrix matters, from activations."""
