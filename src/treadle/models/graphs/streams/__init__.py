"""Graphs of layers on several streams of hidden states (hyper-connections)."""
