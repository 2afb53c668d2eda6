"""``treadle serve`` with several real models: engines, their ends, and what they leave behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Process, Served, until
from tests.server.router.test_launcher import is_alive
from tests.server.test_process import ask, begin

PROMPT = "Once upon a time there was a little"
TEXT = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
LONG = "Once upon a time there was a little girl who lived in a house near the forest. " * 8


def engines(server: Process) -> dict[str, int]:
    """The warm process of a router and its engines, by the system's list of processes."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parts = (folder / "cmdline").read_bytes().split(b"\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"treadle.cli.engine_process" in parts:
                found[folder.name] = int(parent)
    warm = [int(pid) for pid, parent in found.items() if parent == server.popen.pid]
    forked = [int(pid) for pid, parent in found.items() if parent in warm]
    return {"warm": warm[0], **{str(i): pid for i, pid in enumerate(forked)}}


def complete(server: Process, model: str, **more: Any) -> Any:
    status, text = ask(server.url, "/v1/completions", {"model": model, **TEXT, **more})
    value = json.loads(text)
    if status == 200:
        return value["choices"][0]["text"]
    assert status != 500, text
    return status, value["error"]["code"]


@pytest.mark.slow
def test_two_models_from_their_loads_to_their_ends(
    process: Served, data: Path, tmp_path: Path
) -> None:
    """Answers are those of the models alone; an unloaded one finds its prefixes in files; one that
    is killed is started again, and the other goes on.
    """
    import treadle

    stories = data / "models" / "stories260K.gguf"
    demo = Path(treadle.__file__).parent / "data" / "demo.gguf"
    alone = {}
    for path in (stories, demo):
        with treadle.load(path, threads=2, deterministic=True) as model:
            alone[path.stem] = "".join(model.generate(PROMPT, max_tokens=6, temperature=0))
    pages = tmp_path / "pages"
    server = process(
        *(str(stories), str(demo), "--deterministic", "--metrics", "--cache-dir", str(pages))
    )
    for _ in range(2):
        for name, text in alone.items():
            assert complete(server, name) == text
    # Prefixes of a model that was unloaded.
    assert complete(server, "stories260K", prompt=LONG)
    _, text = ask(server.url, "/models/unload", {"model": "stories260K"})
    until(lambda: "unloaded" in ask(server.url, "/v1/models/stories260K")[1])
    _, text = ask(server.url, "/v1/completions", {**TEXT, "model": "stories260K", "prompt": LONG})
    assert json.loads(text)["timings"]["cache"]["files"] > 0
    # A crash under a text.
    connection, answer = begin(
        server.url, {"model": "stories260K", "prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    )
    known = engines(server)
    assert len(known) == 3
    assert len(list(Path(f"/proc/{known['warm']}/task").iterdir())) == 1  # so that it may fork
    listed = json.loads(ask(server.url, "/v1/models")[1])["data"]
    busy = [each["id"] for each in listed if each["treadle"]["n_requests"]]
    assert busy == ["stories260K"]
    for name in ("0", "1"):
        os.kill(known[name], signal.SIGKILL)
    rest = answer.read().decode()
    assert "engine_crashed" in rest
    connection.close()
    for name, text in alone.items():
        assert complete(server, name) == text
    assert complete(server, "nope") == (404, "model_not_found")
    known = engines(server)
    server.popen.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    until(lambda: not any(is_alive(pid) for pid in known.values()))


@pytest.mark.slow
def test_engines_end_with_a_router_that_was_killed(process: Served, data: Path) -> None:
    server = process("--models-dir", str(data / "models"), "--idle-unload", "1000")
    assert complete(server, "stories260K")
    known = engines(server)
    assert len(known) == 2
    server.popen.kill()
    server.end()
    until(lambda: not any(is_alive(pid) for pid in known.values()))
