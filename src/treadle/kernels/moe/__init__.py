"""Mixture of experts: routing, and gathering tokens by expert."""
