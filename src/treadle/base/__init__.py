"""Small helpers for all packages, independent of models."""
