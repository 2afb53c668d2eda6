"""The door of a router: its keys, its variables, and streams that an engine keeps."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.server.conftest import Served, events, until
from tests.server.test_process import ask


@pytest.mark.slow
def test_the_door_of_a_router(
    process: Served, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import treadle

    stories = data / "models" / "stories260K.gguf"
    demo = Path(treadle.__file__).parent / "data" / "demo.gguf"
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo name=alice tokens-per-minute=9 models=demo\n")
    monkeypatch.setenv("TREADLE_SERVE_API_KEY_FILE", str(keys))
    monkeypatch.setenv("TREADLE_SERVE_API_PREFIX", "/llm")
    monkeypatch.setenv("TREADLE_SERVE_TOP_K", "7")  # an engine's
    monkeypatch.setenv("TREADLE_SERVE_DETERMINISTIC", "yes")
    server = process(str(stories), str(demo))
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))

    def names(headers: dict[str, str]) -> list[str]:
        _, text = ask(server.url, "/llm/v1/models", **headers)
        return [each["id"] for each in json.loads(text)["data"]]

    assert names(one) == ["stories260K", "demo"]
    assert names(two) == ["demo"]
    status, text = ask(server.url, "/llm/props?model=demo", **one)
    assert json.loads(text)["default_generation_settings"]["params"]["top_k"] == 7
    body = {"model": "stories260K", "prompt": "x", "max_tokens": 5, "ignore_eos": True}
    status, text = ask(server.url, "/llm/v1/completions", body, **two)
    assert (status, json.loads(text)["error"]["code"]) == (403, "model_not_allowed")

    # A stream is kept by its engine, for its key.
    body |= {"model": "demo", "prompt": "def f(x, y):", "stream": True}
    headers = {**two, "x-conversation-id": "talk"}
    status, whole = ask(server.url, "/llm/v1/completions", body, **headers)
    assert (status, events(whole)[-1]) == (200, "[DONE]")
    assert ask(server.url, "/llm/v1/stream?conv_id=talk", **two) == (200, whole)
    assert ask(server.url, "/llm/v1/stream?conv_id=talk", **one)[0] == 404
    asked = {"conversation_ids": ["talk"]}
    status, text = ask(server.url, "/llm/v1/streams/lookup", asked, **two)
    assert json.loads(text)[0]["total_bytes"] == len(whole.encode())
    assert ask(server.url, "/llm/v1/streams/lookup", asked, **one) == (200, "[]")

    # The engine has told how many tokens it has computed: more than the key may have.
    until(lambda: ask(server.url, "/llm/v1/completions", {"model": "demo"}, **two)[0] == 429)
    assert ask(server.url, "/llm/v1/completions", {**body, "stream": False}, **one)[0] == 200
    server.popen.send_signal(signal.SIGTERM)
    code, err = server.end()
    assert code == 0
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    told = [line for line in lines if line.get("path") == "/v1/completions" and "model" in line]
    assert [line["key"] for line in told][:1] == ["alice"]
    assert told[-1]["key"] == "line-1"
    assert not re.search(r"/treadle/charges|\btwo\b", err)
