"""The version of treadle: X.Y.Z of a release, else X.Y.Z.dev0 of the next one."""

__version__ = "0.1.0.dev0"
