"""Importance matrices: how much each input of a weight matrix matters, by what it carries."""
