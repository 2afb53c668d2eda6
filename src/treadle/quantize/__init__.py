"""Quantising a model file: which tensor becomes what (``plan``), and doing it (``write``)."""
