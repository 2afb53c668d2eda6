"""The steps of a release that a machine can do: docs/release.md tells when.

python tools/release.py prepare 0.2.0                   # the version, and the date in the changes
python tools/release.py check --tag v0.2.0 --dist dist  # nothing is missing
python tools/release.py notes                           # the latest part of the changes
python tools/release.py reopen 0.3.0                    # the version between releases: 0.3.0.dev0
"""

from __future__ import annotations

import argparse
import re
import sys
import zipfile
from datetime import date
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FINAL = re.compile(r"\d+\.\d+\.\d+(rc\d+)?")  # PEP 440; no other form is released
VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)
HEADING = re.compile(r"^## (\S+), (.+)$", re.MULTILINE)
RELATIVE = re.compile(r"\]\((?!https?://|#|mailto:)([^)]+)\)")


class ReleaseError(Exception):
    """A release that is not ready, with the reason."""


def read_version(root: Path = ROOT) -> str:
    """The version of the package, from its source. Raises ReleaseError if there is none."""
    path = root / "src" / "treadle" / "__init__.py"
    found = VERSION.search(path.read_text("utf-8"))
    if found is None:
        raise ReleaseError(f"{path} has no line __version__ = ...")
    return found[1]


def write_version(version: str, root: Path = ROOT) -> None:
    path = root / "src" / "treadle" / "__init__.py"
    text = path.read_text("utf-8")
    path.write_text(VERSION.sub(f'__version__ = "{version}"', text), "utf-8")


def latest_changes(root: Path = ROOT) -> tuple[str, str, str]:
    """The version, the date and the text of the first part of CHANGELOG.md.

    Raises ReleaseError if there is none.
    """
    text = (root / "CHANGELOG.md").read_text("utf-8")
    parts = list(HEADING.finditer(text))
    if not parts:
        raise ReleaseError("CHANGELOG.md has no heading '## VERSION, DATE'")
    end = parts[1].start() if len(parts) > 1 else len(text)
    return parts[0][1], parts[0][2], text[parts[0].end() : end].strip()


def prepare(version: str, today: date, root: Path = ROOT) -> None:
    """Write a final version, and the date of its changes. Raises ReleaseError."""
    if not FINAL.fullmatch(version):
        raise ReleaseError(f"{version!r} is no version to release: expected X.Y.Z or X.Y.ZrcN")
    named, when, _ = latest_changes(root)
    if (named, when) != (version.partition("rc")[0], "unreleased"):
        raise ReleaseError(
            f"CHANGELOG.md begins with '{named}, {when}': expected"
            f" '{version.partition('rc')[0]}, unreleased'"
        )
    write_version(version, root)
    if "rc" in version:
        return
    path = root / "CHANGELOG.md"
    text = path.read_text("utf-8").replace("\nNothing was released yet.", "", 1)
    text = text.replace(" Nothing was released yet.", "", 1)
    path.write_text(text.replace(f"## {version}, unreleased", f"## {version}, {today}", 1), "utf-8")


def reopen(version: str, root: Path = ROOT) -> None:
    """Begin the work on another version. Raises ReleaseError."""
    if not FINAL.fullmatch(version) or "rc" in version:
        raise ReleaseError(f"{version!r} is no next version: expected X.Y.Z")
    named, when, _ = latest_changes(root)
    if when == "unreleased":
        raise ReleaseError(f"CHANGELOG.md has a part for {named} that is not released yet")
    write_version(f"{version}.dev0", root)
    path = root / "CHANGELOG.md"
    text = path.read_text("utf-8")
    path.write_text(text.replace("\n## ", f"\n## {version}, unreleased\n\n## ", 1), "utf-8")


def problems(tag: str | None, dist: Path | None, root: Path = ROOT) -> list[str]:
    """The reasons against a release of this tree, one sentence each."""
    version = read_version(root)
    named, when, _ = latest_changes(root)
    found: list[str] = []
    if not FINAL.fullmatch(version):
        found.append(
            f"src/treadle/__init__.py has {version}: run 'python tools/release.py prepare VERSION'"
        )
    if tag is not None and tag != f"v{version}":
        found.append(f"the tag is {tag}, the version {version}: expected v{version}")
    if named != version.partition("rc")[0]:
        found.append(f"CHANGELOG.md begins with {named}, not with {version}")
    elif when == "unreleased" and "rc" not in version:
        found.append(f"CHANGELOG.md says that {named} is unreleased")
    if dist is not None:
        found += distribution_problems(version, dist)
    return found


def distribution_problems(version: str, dist: Path) -> list[str]:
    """What keeps the files of a folder from being published."""
    wheel = dist / f"treadle-{version}-py3-none-any.whl"
    expected = {wheel.name, f"treadle-{version}.tar.gz"}
    names = {path.name for path in dist.iterdir()}
    if names != expected:
        return [f"{dist} has {sorted(names)}: expected {sorted(expected)}"]
    with zipfile.ZipFile(wheel) as archive:
        metadata = message_from_bytes(archive.read(f"treadle-{version}.dist-info/METADATA"))
    found = []
    if not metadata.get_all("Project-URL"):
        found.append("pyproject.toml has no [project.urls]: the page on PyPI would lead nowhere")
    links = RELATIVE.findall(str(metadata.get_payload()))
    if links:
        found.append(
            f"{len(links)} links of README.md are relative, so the page on PyPI would break them:"
            f" {', '.join(links[:3])}, ... docs/release.md has the cure"
        )
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    steps = parser.add_subparsers(dest="step", required=True)
    for name in ("prepare", "reopen"):
        steps.add_parser(name).add_argument("version")
    check = steps.add_parser("check")
    check.add_argument("--tag")
    check.add_argument("--dist", type=Path)
    steps.add_parser("notes")
    given = parser.parse_args(words)
    try:
        if given.step == "prepare":
            prepare(given.version, date.today())
        elif given.step == "reopen":
            reopen(given.version)
        elif given.step == "notes":
            print(latest_changes()[2])
        else:
            found = problems(given.tag, given.dist)
            print("\n".join(found) or f"treadle {read_version()} is ready")
            return 1 if found else 0
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
