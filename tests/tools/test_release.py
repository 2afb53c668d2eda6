"""The steps of a release, on a small tree."""

from __future__ import annotations

import zipfile
from datetime import date
from pathlib import Path

import pytest

from tools.release import (
    ReleaseError,
    latest_changes,
    prepare,
    problems,
    read_version,
    reopen,
)

DAY = date(2027, 1, 2)
CHANGES = """# Changes

Versions are semantic. Nothing was released yet.

## 0.1.0, unreleased

Much.
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "src" / "treadle").mkdir(parents=True)
    (tmp_path / "src" / "treadle" / "__init__.py").write_text(
        '"""V."""\n\n__version__ = "0.1.0.dev0"  # or of a release\n'
    )
    (tmp_path / "CHANGELOG.md").write_text(CHANGES)
    return tmp_path


def test_from_one_release_to_the_next(root: Path) -> None:
    assert len(problems("v0.1.0", None, root)) == 3  # a version between releases, its tag, no date
    prepare("0.1.0rc1", DAY, root)
    assert problems("v0.1.0rc1", None, root) == []
    assert latest_changes(root)[1] == "unreleased"
    prepare("0.1.0", DAY, root)
    assert problems("v0.1.0", None, root) == []
    assert latest_changes(root) == ("0.1.0", "2027-01-02", "Much.")
    assert "Nothing was released" not in (root / "CHANGELOG.md").read_text()
    reopen("0.2.0", root)
    assert read_version(root) == "0.2.0.dev0"
    assert (root / "CHANGELOG.md").read_text() == (
        "# Changes\n\nVersions are semantic.\n\n## 0.2.0, unreleased\n\n"
        "## 0.1.0, 2027-01-02\n\nMuch.\n"
    )


@pytest.mark.parametrize("version", ["0.2.0", "0.1", "0.1.0.dev0", "v0.1.0"])
def test_another_version_is_refused(root: Path, version: str) -> None:
    before = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    with pytest.raises(ReleaseError):
        prepare(version, DAY, root)
    with pytest.raises(ReleaseError):
        reopen(version, root)
    assert [path.read_bytes() for path in root.rglob("*") if path.is_file()] == before


def test_a_tag_of_another_version(root: Path) -> None:
    prepare("0.1.0", DAY, root)
    assert problems("v0.1.1", None, root) == [
        "the tag is v0.1.1, the version 0.1.0: expected v0.1.0"
    ]


def wheel(folder: Path, metadata: str) -> None:
    with zipfile.ZipFile(folder / "treadle-0.1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("treadle-0.1.0.dist-info/METADATA", metadata)


def test_a_page_of_the_registry_with_links_that_lead_nowhere(root: Path, tmp_path: Path) -> None:
    prepare("0.1.0", DAY, root)
    dist = tmp_path / "dist"
    dist.mkdir()
    (dist / "treadle-0.1.0.tar.gz").touch()
    assert "expected ['treadle-0.1.0-py3-none-any.whl'" in problems(None, dist, root)[0]
    head = "Metadata-Version: 2.4\nName: treadle\n"
    wheel(dist, f"{head}\n[a](docs/a.md) ![b](b.png)\n")
    urls, links = problems(None, dist, root)
    assert "[project.urls]" in urls
    assert links.startswith("2 links of README.md are relative")
    wheel(
        dist,
        f"{head}Project-URL: Source, https://example.org\n\n[a](https://example.org) [b](#b)\n",
    )
    assert problems(None, dist, root) == []
