"""Downloads by name, from a stand-in for the hub on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import FileError
from treadle.hub import HubFile, parse

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"

FILES = {
    "tiny-Q8_0.gguf": b"GGUF whole",
    "split/big-00001-of-00003.gguf": b"GGUF one",
    "split/big-00002-of-00003.gguf": b"GGUF two",
    "split/big-00003-of-00003.gguf": b"GGUF three",
    "README.md": b"no model",
}


class Hub(BaseHTTPRequestHandler):
    """The two addresses that a download asks: a file, and what there is in a repository."""

    requests: list[str] = []  # noqa: RUF012  (one server at a time; the fixture empties it)

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.answer()

    def answer(self) -> None:
        repo, _, path = self.path.removeprefix("/").partition("/resolve/main/")
        body = FILES.get(path) if repo == "owner/repo" else None
        if self.path.startswith("/api/models/owner/repo/tree/main"):
            listed = [{"type": "file", "path": name, "size": 0, "oid": COMMIT} for name in FILES]
            body = json.dumps(listed).encode()
        if body is None:
            self.send_response(404)
            missing = "EntryNotFound" if repo == "owner/repo" else "RepoNotFound"
            self.send_header("X-Error-Code", missing)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a process that asks the stand-in."""
    Hub.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "http", "HTTP"))}
    try:
        yield kept | {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def fetch(ref: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Download in a process of its own: huggingface_hub reads its variables when imported."""
    program = (
        "import sys, time; time.sleep = lambda seconds: None  # retries need not wait here\n"
        "from treadle.hub import download; from treadle.errors import TreadleError\n"
        "calls = []\n"
        "try:\n"
        "    print(download(sys.argv[1], progress=lambda *call: calls.append(call)))\n"
        "except TreadleError as error:\n"
        "    sys.exit(f'{type(error).__name__}: {error}')\n"
        "for call in calls: print(call)\n"
    )
    return subprocess.run(
        [sys.executable, "-c", program, ref],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_file_is_downloaded_once(hub: dict[str, str]) -> None:
    ended = fetch("hf:owner/repo/tiny-Q8_0.gguf", hub)
    path, *calls = ended.stdout.splitlines()
    assert Path(path).read_bytes() == b"GGUF whole"
    assert calls[-1] == "('downloading tiny-Q8_0.gguf', 10, 10)"
    assert ended.stderr == ""
    fetched = [path for path in Hub.requests if "resolve" in path]
    again = fetch("hf:owner/repo/tiny-Q8_0.gguf", hub)
    assert again.stdout.splitlines() == [path]
    assert [path for path in Hub.requests if "resolve" in path] == fetched


def test_offline_what_is_here_is_found_and_the_rest_is_a_clear_error(hub: dict[str, str]) -> None:
    path = fetch("hf:owner/repo/tiny-Q8_0.gguf", hub).stdout.splitlines()[0]
    offline = hub | {"HF_HUB_OFFLINE": "1"}
    Hub.requests.clear()
    assert fetch("hf:owner/repo/tiny-Q8_0.gguf", offline).stdout.splitlines() == [path]
    ended = fetch("hf:owner/repo/other.gguf", offline)
    assert "not in the local cache" in ended.stderr
    assert ended.stderr.startswith("FileError: hf:owner/repo/other.gguf: ")
    assert Hub.requests == []


def test_any_shard_brings_all_of_them(hub: dict[str, str]) -> None:
    ended = fetch("hf:owner/repo/split/big-00002-of-00003.gguf", hub)
    first = Path(ended.stdout.splitlines()[0])
    assert first.name == "big-00001-of-00003.gguf"
    assert sorted(path.name for path in first.parent.iterdir()) == [
        f"big-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("ref", "hint"),
    [
        ("hf:owner/repo/tiny-Q8.gguf", "no such file; did you mean tiny-Q8_0.gguf?"),
        ("hf:owner/repo", "not a file; there are tiny-Q8_0.gguf, split/"),
        ("hf:owner/absent/x.gguf", "no such repository"),
        ("hf:x.gguf", "expected hf:owner/repo/file.gguf"),
    ],
)
def test_what_is_not_there(hub: dict[str, str], ref: str, hint: str) -> None:
    ended = fetch(ref, hub)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"FileError: {ref}: ")
    assert hint in ended.stderr
    assert ended.stderr.count("\n") == 1


def test_a_hub_that_cannot_be_reached(hub: dict[str, str]) -> None:
    ended = fetch("hf:owner/repo/x.gguf", hub | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("FileError: hf:owner/repo/x.gguf: cannot be")


def test_the_command_line_says_it_in_one_line(hub: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "treadle", "inspect", "hf:owner/repo/tiny-Q8_0.gguf"],
        cwd=ROOT, env=hub, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "tiny-Q8_0.gguf" in ended.stderr  # not a model: the reader says so, and names the file
    assert ended.stderr.count("\n") == 1


def test_names() -> None:
    assert parse("hf:owner/repo/a/b.gguf") == HubFile("owner/repo", "a/b.gguf")
    assert parse("hf:owner/repo@v1/b.gguf") == HubFile("owner/repo", "b.gguf", "v1")
    for ref in ("hf:", "hf:/", "hf:owner", "hf:/repo/x.gguf", "owner/repo/x.gguf"):
        with pytest.raises(FileError):
            parse(ref)


@given(index=st.integers(0, 99999), count=st.integers(0, 99999))
def test_shards(index: int, count: int) -> None:
    file = HubFile("o/r", f"m-{index:05d}-of-{count:05d}.gguf")
    if 1 <= index <= count <= 1000:
        shards = file.shards()
        assert len(shards) == count
        assert shards[index - 1] == file.path
    else:
        with pytest.raises(FileError):
            file.shards()
