"""The libraries of the server's page: unchanged files of packages from the npm registry.

::

    python tools/page_libraries.py            # are ours the same as in the packages?
    python tools/page_libraries.py --write    # take them from the packages

For another version: change it here, run with ``--write``, and put the hashes that are printed here.
Needs npm, which checks what it downloads against the registry's own hash.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).resolve().parent.parent / "src/treadle/server/page/vendor"


class File(NamedTuple):
    """A file of the page, and where it is in its package."""

    name: str
    path: str
    sha256: str


class Library(NamedTuple):
    """A package and what is taken from it."""

    package: str
    version: str
    licence: str  # SPDX; of two, the one that is chosen
    files: tuple[File, ...]


LIBRARIES = (
    Library(
        "marked",
        "18.2.1",
        "MIT",
        (
            File(
                "marked.esm.js",
                "lib/marked.esm.js",
                "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de",
            ),
            File(
                "marked.LICENSE.txt",
                "LICENSE",
                "8e3a3f82f59a60958f56ca08f445647c32a4733dc7ca6c2c46f6eb898471ab9c",
            ),
        ),
    ),
    Library(
        "dompurify",
        "3.4.18",
        "Apache-2.0",
        (
            File(
                "purify.es.mjs",
                "dist/purify.es.mjs",
                "1a06b721ad8b46d6174b21f22ea70290aaf3e5a81d65af3b7178113953f7c9b1",
            ),
            File(
                "dompurify.LICENSE.txt",
                "LICENSE",
                "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
            ),
        ),
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "BSD-3-Clause",
        (
            File(
                "highlight.min.js",
                "es/highlight.min.js",
                "1ed8fc5256b738b8875b74e4d3f0754f60d6411fb034d618dfbc4e6e6c9999d7",
            ),
            File(
                "highlightjs.LICENSE.txt",
                "LICENSE",
                "6c081431591d9df696c82dc598fe1423765b8a299b200ed00b281afd0f64c490",
            ),
        ),
    ),
)


def main() -> int:
    """0 where all files are the packages'."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--write", action="store_true", help="take the files from the packages")
    write = parser.parse_args().write
    differ = 0
    for library in LIBRARIES:
        for file, content in taken(library):
            found = hashlib.sha256(content).hexdigest()
            if write:
                FOLDER.mkdir(exist_ok=True)
                (FOLDER / file.name).write_bytes(content)
            ours = (FOLDER / file.name).read_bytes()
            same = ours == content and found == file.sha256
            differ += not same
            print(f"{'same' if same else 'DIFFERS'}  {file.name}  {found}")
    return min(1, differ)


def taken(library: Library) -> list[tuple[File, bytes]]:
    """The files of a package, as the registry has them."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", "--silent", f"{library.package}@{library.version}"],
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        with tarfile.open(Path(folder) / packed.stdout.split()[-1]) as archive:
            return [(file, read(archive, f"package/{file.path}")) for file in library.files]


def read(archive: tarfile.TarFile, name: str) -> bytes:
    """One file of an archive."""
    found = archive.extractfile(name)
    assert found is not None, name
    return found.read()


if __name__ == "__main__":
    sys.exit(main())
