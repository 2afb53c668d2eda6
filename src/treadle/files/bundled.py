"""The header of a bundle: its first 64 KiB, which locate the model in the file.

::

    #!/bin/sh
    # {"treadle_bundle": 1, "name": "model.gguf", "start": 65536, "n_bytes": ..., ...}
    a few lines that start it
    zeros up to START
    the model's bytes, then zeros up to a multiple of START
    a zip archive with the program: Python runs a file that ends with one

The model comes before the archive, because Python's importer cannot read archives with 64-bit
offsets before 3.13: the archive's offsets count from its own beginning, so they stay small.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError

# A multiple of every page size, and of Windows' allocation granularity for mappings.
START = 1 << 16
SCRIPT = b"#!"
FIRST_LINE = b"#!/bin/sh\n"
COMMENT = b"# "
KEY = "treadle_bundle"
VERSION = 1


@dataclass(frozen=True)
class BundleHeader:
    """The record in a bundle's header: where the model is, and which command to run."""

    name: str  # file name of the model before it was bundled
    start: int  # byte of the file where the model begins, a multiple of START
    n_bytes: int  # size of the model
    command: str  # the default command: chat, run or serve
    args: tuple[str, ...] = ()  # its default arguments

    def head(self, script: bytes) -> bytes:
        """Return the file's bytes before the model, padded to ``start``.

        ``script`` is shell code; its last line must exit, because binary data follows. Raises
        UnsupportedError if the header exceeds ``start`` bytes.
        """
        import json
        from dataclasses import asdict

        record = json.dumps({KEY: VERSION, **asdict(self)}).encode("ascii")
        head = FIRST_LINE + COMMENT + record + b"\n" + script
        if len(head) > self.start:
            raise UnsupportedError(f"the bundle's arguments exceed {self.start} bytes")
        return head.ljust(self.start, b"\0")


def read_bundled(file: IO[bytes], path: Path) -> BundleHeader | None:
    """Return the header of an open bundle; None for any other file. ``file`` is left at byte 0.

    Raises FileError for a damaged bundle, UnsupportedError for a bundle of a later version.
    ``path`` is for messages.
    """
    is_script = file.read(len(SCRIPT)) == SCRIPT
    lines = (SCRIPT + file.read(START)).split(b"\n", 2) if is_script else []
    file.seek(0)
    if len(lines) < 3 or not lines[1].startswith(COMMENT + b'{"' + KEY.encode()):
        return None
    import json  # imported late: plain models do not need it

    try:
        return _bundled(json.loads(lines[1][len(COMMENT) :]), file.seek(0, 2), path)
    except (ValueError, TypeError, KeyError) as e:
        raise FileError("a damaged bundle", path=path, where="its second line") from e
    finally:
        file.seek(0)


def _bundled(said: dict[str, Any], size: int, path: Path) -> BundleHeader:
    if said.pop(KEY) != VERSION:
        raise UnsupportedError(f"{path}: a bundle of a later treadle version")
    found = BundleHeader(**{**said, "args": tuple(said["args"])})
    end = found.start + found.n_bytes
    if found.start <= 0 or found.start % START or found.n_bytes <= 0:
        raise ValueError("the model's offset")
    if not all(isinstance(text, str) for text in (found.name, found.command, *found.args)):
        raise TypeError("not text")
    if end > size:
        raise FileError(f"cut short: {size} bytes", path=path, expected=f"{end} bytes or more")
    return found
