"""Projector types that treadle does not support, and the reasons."""

from __future__ import annotations

UNSUPPORTED_PROJECTORS: dict[str, str] = {}
