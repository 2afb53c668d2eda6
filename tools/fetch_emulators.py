"""Fetch qemu-user, which runs the tests of other machines' kernels, from Debian's registry.

Into ``.emulators`` of the checkout, or the folder that ``TREADLE_EMULATORS`` names: 30 MB, of a
download of 71 MB. apt does it with a state of its own, so neither root rights nor changes to this
system are needed; Debian's archive keys must be there (package debian-archive-keyring).

    python tools/fetch_emulators.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
SUITE = "trixie"  # qemu 10: knows Zvfh at every VLEN, i8mm and bf16
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PROGRAMS = ("qemu-aarch64", "qemu-riscv64")
ROOT = Path(__file__).resolve().parent.parent


def apt(state: Path, architecture: str, suite: str, *command: str, folder: Path) -> None:
    """Run an apt command that knows only ``suite`` for ``architecture``; ``state``: a folder for
    what it remembers. Raises CalledProcessError.
    """
    for name in ("lists/partial", "archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={KEYS}] {MIRROR} {suite} main\n")
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state,
        "Dir::Cache::archives": state / "archives",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/nonexistent",
    }
    options = [f"-o{name}={value}" for name, value in settings.items()]
    subprocess.run([*command, "-qq", *options], cwd=folder, check=True, stdout=sys.stderr)


def fetch(to: Path) -> None:
    """Put the emulators into ``to/bin``. Raises CalledProcessError where apt cannot."""
    bin_ = to / "bin"
    bin_.mkdir(parents=True, exist_ok=True)
    (architecture,) = subprocess.run(
        ["dpkg", "--print-architecture"], check=True, capture_output=True, text=True
    ).stdout.split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        state = folder / "apt"
        apt(state, architecture, SUITE, "apt-get", "update", folder=folder)
        apt(state, architecture, SUITE, "apt-get", "download", "qemu-user", folder=folder)
        (package,) = folder.glob("qemu-user_*.deb")
        subprocess.run(["dpkg-deb", "-x", package.name, "root"], cwd=folder, check=True)
        for program in PROGRAMS:
            # Into place at once: a test that runs beside this finds all of it or nothing.
            new = bin_ / f".{program}"
            new.write_bytes((folder / "root/usr/bin" / program).read_bytes())
            new.chmod(0o755)
            new.replace(bin_ / program)


def main() -> int:
    """Fetch what is not there yet; tell where it is."""
    to = Path(os.environ.get("TREADLE_EMULATORS", ROOT / ".emulators"))
    if not all((to / "bin" / program).is_file() for program in PROGRAMS):
        fetch(to)
    print(to / "bin")
    return 0


if __name__ == "__main__":
    sys.exit(main())
