"""Importance matrices: how much each input of a weight matrix matters, from activations.

``collect.py`` sums them over a text; ``matrix.py`` has the matrix, and reads and writes its files.
"""
