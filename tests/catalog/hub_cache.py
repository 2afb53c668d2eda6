"""A cache of the Hugging Face hub in a folder of a test."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

A = "a" * 40
B = "b" * 40


def put(
    root: Path, repo: str, files: Mapping[str, bytes | Path], commit: str = A, *, main: bool = True
) -> Path:
    """Write a snapshot as huggingface_hub does: links to blobs. Returns its folder."""
    folder = root / f"models--{repo.replace('/', '--')}"
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    if main:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(commit)
    for name, content in files.items():
        octets = content.read_bytes() if isinstance(content, Path) else content
        blob = folder / "blobs" / hashlib.sha256(octets).hexdigest()
        blob.write_bytes(octets)
        link = folder / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return folder / "snapshots" / commit
