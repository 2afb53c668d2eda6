"""``list``, ``show``, ``rm`` and ``ps``, and short names in other commands."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete

from tests.catalog.hub_cache import A, B, put
from tests.cli.conftest import Run
from tests.cli.fake import FakeModel
from tests.conftest import WriteTiny
from treadle.catalog.facts import ModelFacts
from treadle.catalog.records import add_speeds
from treadle.cli import app
from treadle.cli.commands import ps, rm
from treadle.cli.commands.pull import hub_name, next_step
from treadle.cli.model_report import ago
from treadle.cli.server_client import StatusError
from treadle.errors import FileError
from treadle.files.stored_entries import note_use


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TREADLE_CACHE", str(tmp_path / "treadle"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


@pytest.fixture
def store(root: Path, tiny: WriteTiny) -> Path:
    file = tiny("llama", "Q8_0")
    put(root, "Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": file})
    put(root, "o/Two-GGUF", {"Two-Q8_0.gguf": tiny("gemma3", "F32"), "Two-Q4_0.gguf": b"GGUF"})
    put(root, "o/Big-GGUF", {"Big-Q4_0-00002-of-00002.gguf": b"12"})
    return root


def file_in(root: Path, name: str) -> Path:
    (found,) = root.rglob(name)
    return found


def test_list_shows_what_there_is(store: Path, run: Run) -> None:
    file = file_in(store, "Qwen3-0.6B-Q8_0.gguf")
    note_use(file)
    result: dict[str, Any] = {"test": "tg128", "tok_s": 12.345, "depth": 0, "threads": 2}
    add_speeds(file, [{**result, "sequences": 1, "device": None}], None)
    ended = run("list")
    assert (ended.code, ended.err) == (0, "")
    lines = ended.out.splitlines()
    assert lines[0].split() == [
        *("name", "type", "params", "size", "context", "reads", "used", "fits", "tokens/s")
    ]
    by_name = {line.split()[0]: line for line in lines[1:]}
    qwen = by_name["qwen3-0.6b"]
    assert qwen.split()[1] == "Q8_0"
    assert qwen.split()[-3:] == ["now", "yes", "12.3"]
    assert "partial" in by_name["big"]
    assert "never" in by_name["two:q8_0"]
    assert "not supported" in by_name["two:q4_0"]
    assert "big: go on with treadle pull hf:o/Big-GGUF/Big-Q4_0-00001-of-00002.gguf" in ended.out
    assert "Two-Q4_0.gguf" in ended.out.rsplit("two:q4_0:", 1)[1]  # why it is not supported


def test_list_for_programs(store: Path, run: Run) -> None:
    reports = {report["name"]: report for report in json.loads(run("list", "--json").out)}
    qwen = reports["qwen3-0.6b"]
    file = file_in(store, "Qwen3-0.6B-Q8_0.gguf")
    assert qwen["path"] == str(file)
    assert qwen["hub"] == "hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"
    assert qwen["n_bytes"] == file.stat().st_size
    assert qwen["memory_bytes"] > qwen["n_bytes"]
    assert (qwen["fits"], qwen["fits_now"], qwen["reads"]) == (True, True, ["text"])
    assert (qwen["last_used"], qwen["text_tok_s"], qwen["problem"]) == (None, None, None)
    assert (reports["big"]["state"], reports["big"]["fits"]) == ("partial", None)


def test_list_of_a_pattern(store: Path, run: Run) -> None:
    names = [report["name"] for report in json.loads(run("list", "two", "--json").out)]
    assert names == ["two:q4_0", "two:q8_0"]
    ended = run("list", "mistral")
    assert (ended.out, ended.code) == ("", 0)
    assert "no model's name fits 'mistral'; `treadle list` shows all 4" in ended.err


def test_list_of_nothing_says_what_to_do(root: Path, run: Run) -> None:
    ended = run("list")
    assert (ended.code, ended.out) == (0, "")
    assert f"no models in {root}: download one with `treadle pull hf:OWNER/REPO`" in ended.err
    assert run("list", "--json").out == "[]\n"


def test_a_model_that_is_larger_than_memory_does_not_fit(
    store: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.catalog import facts
    from treadle.machine import memory

    bound = memory.MemoryBound(100 << 20, 1 << 40, "memory", "")
    monkeypatch.setattr(memory, "memory_bounds", lambda: [bound])
    (report,) = json.loads(run("list", "qwen", "--json").out)
    assert (report["fits"], report["fits_now"]) == (True, False)  # the program alone takes more
    assert bound.free_bytes < facts.PROGRAM_BYTES
    assert "not now" in run("list", "qwen").out
    monkeypatch.setattr(memory, "memory_bounds", lambda: [bound._replace(limit_bytes=1)])
    assert run("list", "qwen").out.splitlines()[1].split()[-1] == "no"
    monkeypatch.setattr(memory, "memory_bounds", list)  # the system does not tell
    assert json.loads(run("list", "qwen", "--json").out)[0]["fits"] is None


def test_fifty_models_are_listed_from_their_headers(
    root: Path, run: Run, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    octets = tiny("llama", "Q8_0").read_bytes()
    for i in range(50):
        put(root, f"o/m{i}-GGUF", {f"m{i}-Q8_0.gguf": octets + bytes(32 * i)})
    assert len(json.loads(run("list", "--json").out)) == 50
    from treadle.convert import open as opening

    monkeypatch.setattr(opening, "open_model", None)  # the second listing opens none
    assert len(json.loads(run("list", "--json").out)) == 50


def test_show(store: Path, run: Run) -> None:
    ended = run("show", "qwen")
    assert ended.code == 0
    lines = dict(line.split("  ", 1) for line in ended.out.splitlines()[1:] if "  " in line)
    assert ended.out.splitlines()[0] == "qwen3-0.6b"
    assert lines["hub"].strip() == "hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"
    assert "completion" in lines["capabilities"]
    assert "tokens of context" in lines["memory"]
    report = json.loads(run("show", "qwen", "--json").out)
    assert report["architecture"] == "llama"
    assert "tensors" not in report  # these are `inspect`'s


def test_show_of_a_file_outside_the_store(root: Path, run: Run, tiny: WriteTiny) -> None:
    file = tiny("llama", "Q8_0")
    report = json.loads(run("show", str(file), "--json").out)
    assert (report["name"], report["path"], report["hub"]) == (None, str(file), None)
    ended = run("show", "nothing")
    assert (ended.code, ended.err) == (1, "treadle: error: nothing: no such file\n")


def test_rm_asks_and_says_what_is_freed(
    store: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_in(store, "Qwen3-0.6B-Q8_0.gguf")
    refused = run("rm", "qwen")
    assert refused.code == 2
    assert "standard input is no terminal to ask on: --yes removes them" in refused.err
    monkeypatch.setattr(rm, "can_ask", lambda: True)
    kept = run("rm", "qwen", stdin="n\n")
    assert kept.code == 1
    assert "Remove, and free" in kept.err
    assert kept.err.endswith("nothing was removed\n")
    assert file.exists()
    gone = run("rm", "qwen", stdin="y\n")
    assert gone.code == 0
    assert gone.out == "removed hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf\n"
    assert not (store / "models--Qwen--Qwen3-0.6B-GGUF").exists()


def test_rm_refuses_what_is_not_clear(store: Path, run: Run) -> None:
    ended = run("rm", "-y", "qwen", "two")
    assert ended.code == 1
    assert "two: fits 2 models: two:q4_0, two:q8_0: name one of them" in ended.err
    assert file_in(store, "Qwen3-0.6B-Q8_0.gguf").exists()  # all or nothing
    ended = run("rm", "-y", "qwen3-1b")
    assert "qwen3-1b: no such model on this machine; did you mean qwen3-0.6b?" in ended.err


def test_rm_of_several_and_of_what_is_unfinished(store: Path, run: Run) -> None:
    ended = run("rm", "-y", "two:q4_0", "two:q8_0", "big", "two:q8_0")
    assert ended.code == 0
    assert len(ended.out.splitlines()) == 3
    assert [path.name for path in store.iterdir()] == ["models--Qwen--Qwen3-0.6B-GGUF"]


def test_rm_says_what_another_revision_keeps(store: Path, run: Run) -> None:
    old = put(store, "o/r-GGUF", {"r-Q8_0.gguf": b"same"}, A, main=False)
    put(store, "o/r-GGUF", {"r-Q8_0.gguf": b"same"}, B)
    ended = run("rm", "-y", "r")
    stays = "0 B freed; 1 file stays, because another revision of the model uses it"
    assert ended.err == f"treadle: {stays}\n"
    assert (old / "r-Q8_0.gguf").exists()


def test_rm_refuses_what_a_server_has_mapped(
    store: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    from treadle.catalog import removal
    from treadle.machine.mapped_files import MappingProcess

    user = MappingProcess(7, "treadle serve qwen")
    monkeypatch.setattr(removal, "mapping_processes", lambda files: [user] if list(files) else [])
    ended = run("rm", "-y", "qwen")
    assert ended.code == 1
    assert "is in use by process 7 (treadle serve qwen): stop it first" in ended.err
    assert file_in(store, "Qwen3-0.6B-Q8_0.gguf").exists()


# -- short names in other commands ----------------------------------------------------------------


def loaded(model: FakeModel) -> str:
    (call,) = [call for call in model.calls if call[0] == "load"]
    return str(call[1])


def test_commands_take_short_names(store: Path, run: Run, model: FakeModel) -> None:
    ended = run("run", "qwen3-0.6b", "once", "-n", "1")
    assert ended.code == 0
    assert ended.err == ""  # a whole name needs no remark
    assert loaded(model) == str(file_in(store, "Qwen3-0.6B-Q8_0.gguf"))


def test_a_part_of_a_name_is_told(store: Path, run: Run, model: FakeModel) -> None:
    ended = run("run", "qwen", "once", "-n", "1")
    name = "hf:Qwen/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q8_0.gguf"
    assert f"treadle: qwen: qwen3-0.6b, {name}\n" in ended.err
    assert loaded(model) == str(file_in(store, "Qwen3-0.6B-Q8_0.gguf"))


def test_a_use_is_recorded(store: Path, run: Run, model: FakeModel) -> None:
    run("run", "qwen", "once", "-n", "1")
    (report,) = json.loads(run("list", "qwen", "--json").out)
    assert report["last_used"] > 0


def test_one_word_is_a_prompt_unless_it_is_a_whole_name(
    store: Path, run: Run, model: FakeModel
) -> None:
    run("run", "qwen", "-n", "1")
    assert loaded(model) == "None"  # the model inside the package
    model.calls.clear()
    run("run", "Qwen3-0.6B", "-n", "1", stdin="once")
    assert loaded(model) == str(file_in(store, "Qwen3-0.6B-Q8_0.gguf"))


def test_an_existing_path_wins(store: Path, run: Run, model: FakeModel, tmp_path: Path) -> None:
    (tmp_path / "qwen3-0.6b").write_bytes(b"GGUF")
    run("run", "qwen3-0.6b", "once", "-n", "1")
    assert loaded(model) == "qwen3-0.6b"


def test_what_fits_nothing_gets_the_error_of_a_file(store: Path, run: Run) -> None:
    ended = run("tokenize", "qwen3-1b", "x")
    similar = "qwen3-1b: no such file; downloaded models with similar names: qwen3-0.6b"
    assert ended.err == f"treadle: error: {similar}\n"
    ended = run("tokenize", "two", "x")
    assert "two: fits 2 downloaded models: two:q4_0, two:q8_0: name one of them" in ended.err
    ended = run("tokenize", "big", "x")
    assert "its download is not finished: go on with `treadle pull hf:o/Big-GGUF/" in ended.err


def test_completion_offers_names(store: Path, tmp_path: Path) -> None:
    """Names for models, then files; a colon would end a word in bash."""

    def complete(*words: str) -> list[str]:
        completer = ShellComplete(app.app, {}, "treadle", "_TREADLE_COMPLETE")
        return [item.value for item in completer.get_completions([*words[:-1]], words[-1])]

    assert complete("serve", "q")[0] == "qwen3-0.6b"
    assert complete("rm", "tw") == ["two-q4_0", "two-q8_0"]
    assert complete("show", "TW")[:2] == ["two-q4_0", "two-q8_0"]
    assert complete("run", "zz") == ["zz"]  # the shell completes files


# -- ps -------------------------------------------------------------------------------------------


class AnsweringServer(BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, Any]] = {}  # noqa: RUF012
    keys: list[str | None] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        status, answer = self.answers.get(self.path, (404, {"error": "no such thing"}))
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


MODEL = {
    "id": "tiny",
    "architecture": {"input_modalities": ["text", "image"]},
    "meta": {"n_ctx": 4096, "n_params": 600_000_000, "size": 700 << 20},
}
SLOTS = [{"is_processing": True}, {"is_processing": False}]


@pytest.fixture
def server() -> Iterator[str]:
    AnsweringServer.keys.clear()
    AnsweringServer.answers = {
        "/v1/models": (200, {"data": [MODEL]}),
        "/health": (200, {"status": "ok"}),
        "/slots": (200, SLOTS),
    }
    listening = ThreadingHTTPServer(("127.0.0.1", 0), AnsweringServer)
    thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_ps_shows_the_model_and_its_work(server: str, run: Run) -> None:
    ended = run("ps", "--url", f"{server}/")
    assert (ended.code, ended.err) == (0, "")
    row = ended.out.splitlines()[1].split("  ")
    assert [cell.strip() for cell in row if cell.strip()] == [
        *("tiny", "ready", "600M", "700 MiB", "4096", "text, pictures", "1 of 2")
    ]
    (report,) = json.loads(run("ps", "--url", server, "--json").out)
    assert (report["n_requests"], report["n_slots"], report["state"]) == (1, 2, "ready")


def test_ps_of_a_server_with_a_key(server: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_API_KEY", "secret")
    monkeypatch.setenv("TREADLE_URL", server)
    assert run("ps").code == 0
    assert set(AnsweringServer.keys) == {"Bearer secret"}
    AnsweringServer.answers["/v1/models"] = (401, {})
    ended = run("ps")
    assert ended.err == f"treadle: error: {server}: the server wants an API key: --api-key KEY\n"


def test_the_state_does_not_hang_on_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port has the digits of another status."""

    def refuse(base: str, path: str, api_key: str | None) -> None:
        raise StatusError(f"{base}{path}: the server answered HTTP status 404", status=404)

    monkeypatch.setattr(ps, "get", refuse)
    assert ps.state_of("http://127.0.0.1:50350", None) == "unknown"


@pytest.mark.parametrize(("status", "state"), [(503, "loading"), (500, "failed"), (404, "unknown")])
def test_ps_tells_the_state(server: str, run: Run, status: int, state: str) -> None:
    AnsweringServer.answers["/health"] = (status, {})
    del AnsweringServer.answers["/slots"]
    (report,) = json.loads(run("ps", "--url", server, "--json").out)
    assert (report["state"], report["n_slots"]) == (state, None)


def test_ps_of_several_models(server: str, run: Run) -> None:
    """As a router lists them: each with its own state."""
    other = {"id": "other", "status": {"value": "unloaded"}}
    data = [{**MODEL, "status": {"value": "loaded"}}, other]
    AnsweringServer.answers["/v1/models"] = (200, {"data": data})
    reports = json.loads(run("ps", "--url", server, "--json").out)
    assert [(report["name"], report["state"]) for report in reports] == [
        ("tiny", "loaded"),
        ("other", "unloaded"),
    ]
    assert "other" in run("ps", "--url", server).out


@pytest.mark.parametrize("body", [b"<html>", [1], {"data": 1}, {"data": ["x", None]}])
def test_ps_of_what_is_no_server_of_models(server: str, run: Run, body: Any) -> None:
    AnsweringServer.answers["/v1/models"] = (200, body)
    ended = run("ps", "--url", server)
    assert ended.err.count("\n") == 1
    assert ended.out == ""


def test_ps_without_a_server(run: Run) -> None:
    ended = run("ps", "--url", "http://127.0.0.1:9")
    assert ended.code == 1
    assert "treadle: error: no server answers at http://127.0.0.1:9 (" in ended.err
    assert "start one with `treadle serve MODEL`, or name another with --url" in ended.err
    assert run("ps", "--url", "127.0.0.1:9").code == 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "now"), (59, "now"), (60, "1 min ago"), (7300, "2 h ago"), (86400 * 3, "3 d ago")],
)
def test_ago(seconds: float, text: str) -> None:
    assert ago(seconds) == text


@pytest.mark.parametrize(
    ("facts", "step"),
    [
        (ModelFacts(has_template=True), "treadle chat 'a b'"),
        (ModelFacts(), "treadle run 'a b'"),
        (ModelFacts(kind="vectors"), "treadle embed 'a b' TEXT"),
        (ModelFacts(kind="scores"), "treadle rerank 'a b' QUERY DOCUMENT"),
        (ModelFacts(problem="no such"), "treadle inspect 'a b' (no such)"),
    ],
)
def test_the_next_step(facts: ModelFacts, step: str) -> None:
    assert next_step("a b", facts) == step


def test_pull_knows_the_names_of_what_is_here(store: Path) -> None:
    """An unfinished download goes on by its short name."""
    assert hub_name("big") == "hf:o/Big-GGUF/Big-Q4_0-00001-of-00002.gguf"
    assert hub_name("owner/repo:Q8_0") == "hf:owner/repo:Q8_0"
    with pytest.raises(FileError, match="two: no name on the hub"):
        hub_name("two")  # which of both?


def test_an_interrupted_pull_says_how_to_go_on(
    root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treadle.hub.fetch.download", interrupt)
    ended = run("pull", "owner/repo")
    assert (ended.code, ended.out) == (130, "")
    go_on = "go on with `treadle pull hf:owner/repo`; what has arrived is kept"
    assert ended.err == f"treadle: interrupted: {go_on}\n"


@pytest.mark.usefixtures("small_buffers")
def test_bench_records_its_speeds(store: Path, run: Run) -> None:
    ended = run("bench", "qwen", "-p", "4", "-n", "2", "-r", "1", "-t", "1", "--json")
    results = {result["test"]: result["tok_s"] for result in json.loads(ended.out)}
    (report,) = json.loads(run("list", "qwen", "--json").out)
    assert report["prompt_tok_s"] == results["pp4"]
    assert report["text_tok_s"] == results["tg2"]


def test_the_help_lists_them_among_the_models(run: Run) -> None:
    models = run("--help").out.split("Models:")[1].split("Measure:")[0]
    found = [line.split()[0] for line in models.strip().splitlines()]
    names = "pull warm list show rm ps inspect plan diff tokenize"
    assert found == names.split()
    assert os.environ.get("TREADLE_MODELS") is None
