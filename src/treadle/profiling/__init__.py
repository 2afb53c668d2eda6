"""Measurements of this machine: peak rates, kernel trials, and the report of ``treadle doctor``."""
