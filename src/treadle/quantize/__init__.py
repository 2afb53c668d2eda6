"""Quantisation of a model file: choosing formats (``plan``) and writing (``write``)."""
