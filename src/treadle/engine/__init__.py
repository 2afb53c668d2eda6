"""Runs one batch on one device: its prepared plan, and the logits that come out."""
