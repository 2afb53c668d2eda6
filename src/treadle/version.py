"""The version of treadle."""

__version__ = "0.1.0"
