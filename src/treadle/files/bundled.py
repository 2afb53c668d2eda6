"""A bundle's first 64 KiB: where in the file its model lies.

::

    #!/bin/sh
    # {"treadle_bundle": 1, "name": "model.gguf", "start": 65536, "n_bytes": ..., ...}
    a few lines that start it
    zeros up to START
    the model's bytes, then zeros up to a multiple of START
    a zip archive with the program: Python runs a file that ends with one

The model comes first, because Python's importer reads no archive with 64-bit offsets before 3.13:
this one counts from its own beginning, however large the model is.
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

from treadle.base.fast_dataclass import dataclass
from treadle.errors import FileError, UnsupportedError

# A multiple of every page size, and of what Windows asks of a mapping's beginning.
START = 1 << 16
SCRIPT = b"#!"
FIRST_LINE, COMMENT = b"#!/bin/sh\n", b"# "
KEY, VERSION = "treadle_bundle", 1


@dataclass(frozen=True)
class BundleHeader:
    """What a bundle says of itself."""

    name: str  # of the model's file, before
    start: int  # byte of the file where the model begins, a multiple of START
    n_bytes: int  # of the model
    command: str  # what it does when nothing else is typed: chat, run or serve
    args: tuple[str, ...] = ()  # and with these arguments

    def head(self, script: bytes) -> bytes:
        """The file's bytes up to the model's. ``script`` is for the shell, and its last line ends
        it: what follows is none.
        """
        import json
        from dataclasses import asdict

        record = json.dumps({KEY: VERSION, **asdict(self)}).encode("ascii")
        head = FIRST_LINE + COMMENT + record + b"\n" + script
        if len(head) > self.start:
            raise UnsupportedError(f"the bundle's arguments exceed {self.start} bytes")
        return head.ljust(self.start, b"\0")


def read_bundled(file: IO[bytes], path: Path) -> BundleHeader | None:
    """What the bundle that is open says; None for any other file. Leaves ``file`` at its beginning.

    Raises FileError for a bundle that is damaged, UnsupportedError for one of a later version.
    """
    is_script = file.read(len(SCRIPT)) == SCRIPT
    lines = (SCRIPT + file.read(START)).split(b"\n", 2) if is_script else []
    file.seek(0)
    if len(lines) < 3 or not lines[1].startswith(COMMENT + b'{"' + KEY.encode()):
        return None
    import json  # a plain model is read without

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
