"""Interrupted downloads go on where they stopped; a stand-in for the hub interrupts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub import fake_hub
from tests.hub.fake_hub import Hub

ROOT = Path(__file__).resolve().parents[2]
N = 5 << 20  # bytes of the file: several chunks
BODY = bytes(range(256)) * (N // 256)
REF = "hf:owner/long-GGUF/long-Q8_0.gguf"

# Runs in a process of its own: huggingface_hub reads its variables when it is imported.
PROGRAM = """
import json, sys, time
from pathlib import Path
import treadle.hub.resume as resume
from treadle.catalog.stored import find_stored
from treadle.errors import TreadleError
from treadle.hub import download
resume.RESUMED_FROM = 1 << 20
time.sleep = lambda seconds: None
ref, stop_at, damage = json.loads(sys.argv[1])
done = []

def progress(stage, n, total):
    done.append(n)
    if stop_at and n >= stop_at and n < total:
        raise KeyboardInterrupt

def state():
    return [[m.label, m.is_whole, m.n_bytes, m.unfinished and m.unfinished.ref,
             m.unfinished and m.unfinished.n_bytes] for m in find_stored()]

def attempt():
    begun = len(done)
    try:
        path = download(ref, progress=progress, projector=False)
        said = Path(path).read_bytes().hex()[:8], Path(path).stat().st_size
    except (KeyboardInterrupt, TreadleError) as error:
        said = type(error).__name__, str(error)
    return {"said": said, "first": (done[begun:] or [None])[0], "last": done[-1], "state": state()}

out = [attempt()]
stop_at = 0
if damage:
    (part,) = [each.part for each in resume.unfinished_downloads()]
    with part.open("r+b") as file:
        file.write(b"other bytes")
out += [attempt(), attempt()] if damage or out[0]["said"][0] == "KeyboardInterrupt" else []
print(json.dumps(out))
"""


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The ranges of the requests for the file."""
    monkeypatch.setitem(fake_hub.REPOS, "owner/long-GGUF", {"long-Q8_0.gguf": BODY})
    Hub.ranges.clear()
    Hub.cut_at = 0
    Hub.knows_ranges = True
    yield Hub.ranges
    Hub.cut_at = 0
    Hub.knows_ranges = True


def attempts(hub: dict[str, str], *, stop_at: int = 0, damage: bool = False) -> list[Any]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([REF, stop_at, damage])],
        cwd=ROOT,
        env=hub,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return list(json.loads(ran.stdout))


WHOLE = [BODY[:4].hex(), N]


def test_ctrl_c_loses_nothing(hub: dict[str, str], served: list[str], tmp_path: Path) -> None:
    """The rest is downloaded with one request for it, and the note about it goes."""
    stopped, resumed, again = attempts(hub, stop_at=2 << 20)
    assert stopped["said"][0] == "KeyboardInterrupt"
    ((label, is_whole, n_done, ref, n_bytes),) = stopped["state"]
    assert (label, is_whole, ref, n_bytes) == ("long", False, REF, N)
    assert 2 << 20 <= n_done < N
    assert served == ["", f"bytes={n_done}-"]
    assert resumed["said"] == WHOLE
    assert (resumed["first"], resumed["last"]) == (n_done, N)
    assert resumed["state"] == [["long", True, N, None, None]]
    assert again["said"] == WHOLE
    assert list((tmp_path / "treadle" / "downloads").iterdir()) == []
    assert list((tmp_path / "hub").rglob("*.incomplete")) == []


def test_a_lost_connection_is_made_again(hub: dict[str, str], served: list[str]) -> None:
    Hub.cut_at = 2 << 20  # bytes of each answer
    (ended,) = attempts(hub)
    assert ended["said"] == WHOLE
    assert served == ["", f"bytes={2 << 20}-", f"bytes={4 << 20}-"]


def test_a_server_that_ignores_ranges_sends_all_of_it(
    hub: dict[str, str], served: list[str]
) -> None:
    Hub.knows_ranges = False
    _, resumed, _ = attempts(hub, stop_at=2 << 20)
    assert resumed["said"] == WHOLE
    assert resumed["last"] == N


def test_other_bytes_are_noticed(hub: dict[str, str], served: list[str]) -> None:
    """They are removed, so the next download is right."""
    _, wrong, right = attempts(hub, stop_at=2 << 20, damage=True)
    assert wrong["said"][0] == "FileError"
    assert "are not those that the hub announced: download it again" in wrong["said"][1]
    assert right["said"] == WHOLE
    assert right["first"] == 0
