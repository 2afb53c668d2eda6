"""What the router answers itself, in each protocol's shape; on files without weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.router.fakes import FakeLauncher, Writer, models, routed, say, settled, until
from tests.server.router.test_forwarding import FIXED, echo
from tests.server.router.test_pool import in_loop
from treadle.catalog.facts import PROGRAM_BYTES
from treadle.errors import FileError
from treadle.server.http.api_errors import ApiError
from treadle.server.router.library import CopiedNames, hub_name
from treadle.server.router.memory_need import need_of
from treadle.server.router.merged_metrics import merge
from treadle.server.router.model_list import EngineOptions, scan_folder, scan_library
from treadle.server.router.served_model import MemoryRequest, ServedModel
from treadle.server.router.service import RouterSettings, keep_seconds

LIBRARY = RouterSettings(library=True)


@pytest.fixture
def stories(data: Path) -> ServedModel:
    return ServedModel("stories", str(data / "models" / "stories260K.gguf"), aliases=("s",))


@in_loop
async def test_the_list_of_models(data: Path) -> None:
    stories = ServedModel(
        "stories", str(data / "models" / "stories260K.gguf"), aliases=("s",), pinned=True
    )
    launcher = FakeLauncher(answer=echo)
    async with routed(launcher, [stories, *models("gone")]) as router:
        found = (await router.get("/v1/models")).json()["data"]
        assert found == (await router.get("/models")).json()["data"]
        assert [each["id"] for each in found] == ["stories", "gone"]
        first = found[0]
        assert first["aliases"] == ["s"]
        assert first["status"] == {"value": "unloaded"}
        assert first["architecture"]["output_modalities"] == ["text"]
        assert (first["meta"]["n_ctx_train"], first["meta"]["size"]) == (2048, 1185376)
        assert first["treadle"]["pinned"] is True
        assert found[1]["meta"]["size"] is None
        await router.post("/v1/completions", {"model": "s"})
        one = (await router.get("/v1/models/s")).json()
        assert one["status"]["value"] == "loaded"
        assert one["meta"]["n_ctx"] == 64  # what the engine told
        launcher.engines[0].end(-9)
        await settled()
        status = (await router.get("/v1/models/stories")).json()["status"]
        assert status["value"] == "unloaded"
        assert (status["failed"], status["exit_code"]) == (True, -9)
        assert (await router.get("/v1/models/nope")).status == 404
        headers = {"anthropic-version": "2023-06-01"}
        listed = (await router.get("/v1/models", **headers)).json()
        assert (listed["first_id"], listed["last_id"]) == ("stories", "gone")
        assert listed["data"][0]["max_input_tokens"] == 2048


@in_loop
async def test_the_lists_of_ollama(data: Path) -> None:
    stories = ServedModel("stories", str(data / "models" / "stories260K.gguf"))
    launcher = FakeLauncher(answer=echo)
    async with routed(launcher, [stories]) as router:
        (tag,) = (await router.get("/api/tags")).json()["models"]
        assert (tag["name"], tag["size"]) == ("stories", 1185376)
        assert tag["details"]["parameter_size"] == "293K"
        assert (await router.get("/api/ps")).json() == {"models": []}
        await router.post("/api/generate", {"model": "stories:latest", "prompt": "x"})
        (ps,) = (await router.get("/api/ps")).json()["models"]
        assert ps["expires_at"].startswith("9999")
        told = (await router.post("/api/show", {"model": "stories"})).json()
        assert told["model_info"]["llama.context_length"] == 2048
        assert told["capabilities"] == ["completion", "embedding", "tools"]
        assert told["details"]["quantization_level"] == "F32"
        assert (await router.post("/api/show", {})).status == 400


@in_loop
async def test_options_are_listed_without_folders() -> None:
    args = ("--lora=/home/me/x.gguf=0.5", "--cache-dir=/home/me/pages", "--temperature=0.5")
    async with routed(FakeLauncher(answer=echo), models("small", args=args)) as router:
        assert (await router.get("/v1/models/small")).json()["status"] == {"value": "unloaded"}
        await router.post("/v1/completions", {"model": "small"})
        status = (await router.get("/models")).json()["data"][0]["status"]
        named = ["--lora=x.gguf=0.5", "--cache-dir=pages", "--temperature=0.5"]
        assert status["args"] == ["treadle", "serve", *named]


@in_loop
async def test_a_key_hears_only_of_its_models(tmp_path: Path) -> None:
    """In lists, errors, metrics and events; it removes no others either."""

    async def told(call: dict[str, Any], writer: Writer) -> None:
        await say(writer, b"# TYPE x counter\nx_total 3\n")

    keys = tmp_path / "keys"
    keys.write_text("one\ntwo models=small\n")
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    settings: dict[str, Any] = {"api_key_file": keys, "metrics": True}
    async with routed(FakeLauncher(answer=told), FIXED, own=LIBRARY, **settings) as router:
        clients = [router.call("GET", "/models/sse", headers=headers) for headers in (one, two)]
        await until(lambda: all(client.reply.body for client in clients))
        for name in ("large-7b", "small"):
            await router.post("/v1/completions", {"model": name}, **one)
        await until(lambda: all(b"small" in client.reply.body for client in clients))
        for client in clients:
            client.leave()
            await client.task
        found = [client.reply.body for client in clients]
        for path in ("/api/ps", "/metrics"):
            found += [(await router.get(path, **headers)).body for headers in (one, two)]
        for method, path in (("POST", "/v1/completions"), ("DELETE", "/api/delete")):
            for headers in (one, two):
                reply = await router.call(method, path, {"model": "nope"}, headers).whole()
                assert reply.status == 404
                found.append(reply.body)
        found += [b"large-7b", (await router.post("/api/show", {"model": "large"}, **two)).body]
        assert all(b"large-7b" in body for body in found[::2])
        assert not any(b"large-7b" in body for body in found[1::2])
        delete = router.call("DELETE", "/models?model=large-7b", None, two)
        assert (await delete.whole()).json()["error"]["code"] == "model_not_allowed"


@in_loop
async def test_the_routers_own_state() -> None:
    async def told(call: dict[str, Any], writer: Writer) -> None:
        await say(writer, b"# HELP x y\n# TYPE x counter\nx_total 3\n")

    async with routed(FakeLauncher(answer=told), FIXED, metrics=True) as router:
        assert (await router.get("/health")).json() == {"status": "ok"}
        props = (await router.get("/props")).json()
        assert (props["role"], props["models_autoload"]) == ("router", True)
        reply = await router.get("/props?model=small&autoload=false")
        assert reply.json()["error"]["code"] == "model_not_loaded"
        assert (await router.get("/slots?model=small")).json() == []
        for name in ("small", "large-7b"):
            await router.post("/v1/completions", {"model": name})
        text = (await router.get("/metrics")).body.decode()
        assert 'treadle:router_model_state{model="small"} 4.0' in text
        assert text.count("# TYPE x counter") == 1
        assert 'x_total{model="small"} 3' in text
        assert 'x_total{model="large-7b"} 3' in text
        text = (await router.get("/metrics?model=small")).body.decode()
        assert "large-7b" not in text
        assert (await router.get("/api/version")).status == 200
        assert (await router.get("/nowhere")).status == 404
        assert (await router.post("/api/create", {})).status == 501
        router.service.draining = True
        assert (await router.post("/v1/completions", {"model": "small"})).status == 503


def test_metrics_of_several_engines_are_one_text() -> None:
    one = '# HELP h Times\n# TYPE h histogram\nh_bucket{le="1.0"} 2.0\nh_count 2.0\n'
    assert merge({'a"b': one, "c": one}) == (
        "# HELP h Times\n# TYPE h histogram\n"
        'h_bucket{model="a\\"b",le="1.0"} 2.0\nh_count{model="a\\"b"} 2.0\n'
        'h_bucket{model="c",le="1.0"} 2.0\nh_count{model="c"} 2.0\n'
    )
    assert merge({}) == ""


@in_loop
async def test_events_of_all_models() -> None:
    async with routed(FakeLauncher(), FIXED) as router:
        client = router.call("GET", "/models/sse")
        await until(lambda: client.reply.body)
        await router.post("/models/load", {"model": "small"})
        await until(lambda: b'"loaded"' in client.reply.body)
        lines = [line for line in client.reply.body.split(b"\n\n") if line.startswith(b"data: ")]
        told = [json.loads(line.removeprefix(b"data: ")) for line in lines]
        assert [each["data"]["status"] for each in told] == ["loading", "loaded"]
        client.leave()
        await client.task
        assert not router.service.pool.listeners
        reply = await router.post("/models/load", {"model": "nope"})
        assert reply.status == 404


@in_loop
async def test_a_folder_is_followed(tmp_path: Path) -> None:
    """A new file is served; the engine of one that is gone, or was replaced, is unloaded."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    scan = scan_folder(tmp_path, EngineOptions())
    launcher = FakeLauncher(answer=echo)
    async with routed(launcher, [], [scan]) as router:
        for name in "ab":
            assert (await router.post("/v1/completions", {"model": name})).status == 200
        (tmp_path / "a.gguf").unlink()
        (tmp_path / "b.gguf").write_bytes(b"GGUF of another size")
        (tmp_path / "c.gguf").write_bytes(b"GGUF")
        found = (await router.get("/models?reload=1")).json()["data"]
        assert [each["id"] for each in found] == ["b", "c"]
        await until(lambda: all(engine.ended.done() for engine in launcher.engines))
        assert (await router.post("/v1/completions", {"model": "a"})).status == 404
        assert (await router.post("/v1/completions", {"model": "b"})).status == 200


# -- the library ----------------------------------------------------------------------------------


@pytest.fixture
def stored(one_kernel_cache: Path, data: Path) -> Iterator[Path]:
    """A downloaded model, in the cache of the tests."""
    root = one_kernel_cache / "hub" / "models--me--Stories-GGUF"
    folder = root / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("abc")
    file = folder / "stories-F32.gguf"
    file.write_bytes((data / "models" / "stories260K.gguf").read_bytes())
    yield file
    import shutil

    shutil.rmtree(root, ignore_errors=True)


@in_loop
async def test_clients_change_nothing_unless_they_may() -> None:
    async with routed(FakeLauncher(), FIXED) as router:
        for method, path, body in (
            ("POST", "/api/pull", {"model": "hf.co/a/b"}),
            ("DELETE", "/api/delete", {"model": "small"}),
            ("POST", "/api/copy", {"source": "small", "destination": "x"}),
            ("POST", "/models", {"model": "a/b"}),
            ("DELETE", "/models?model=small", None),
        ):
            reply = await router.call(method, path, body).whole()
            assert reply.status == 403
            assert b"--library" in reply.body


def test_the_library(stored: Path, tmp_path: Path) -> None:
    @in_loop
    async def run() -> None:
        copies = CopiedNames(tmp_path / "state" / "copies.json")
        scan = scan_library(EngineOptions())
        launcher = FakeLauncher(answer=echo)
        fixed = models("fixed")
        async with routed(launcher, fixed, [scan], copies=copies, own=LIBRARY) as router:
            listed = (await router.get("/models")).json()["data"]
            assert [each["id"] for each in listed] == ["fixed", "stories"]
            body = {"source": "stories", "destination": "mine:latest"}
            assert (await router.post("/api/copy", body)).status == 200
            assert (await router.post("/api/copy", body)).status == 400
            names = [each["name"] for each in (await router.get("/api/tags")).json()["models"]]
            assert names == ["fixed", "stories", "mine:latest"]
            assert (await router.post("/v1/completions", {"model": "mine"})).status == 200
            assert launcher.names == ["stories"]
            assert CopiedNames(copies.path).names == {"mine:latest": "stories"}
            delete = router.call("DELETE", "/api/delete", {"model": "mine:latest"})
            assert (await delete.whole()).status == 200
            assert stored.exists()
            assert (await router.call("DELETE", "/models?model=fixed").whole()).status == 403
            assert (await router.call("DELETE", "/models?model=storie").whole()).status == 404
            assert (await router.call("DELETE", "/models?model=stories").whole()).status == 200
            assert not stored.exists()
            assert launcher.engines[0].ended.done()
            assert (await router.post("/v1/completions", {"model": "stories"})).status == 404

    run()


@in_loop
async def test_a_download_with_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def download(ref: str, *, progress: Any, **more: Any) -> Path:
        asked.append(ref)
        if ref.endswith("/bad"):
            raise FileError("no such repository", path=ref)
        if ref.endswith("/endless"):
            try:
                while True:
                    progress("downloading x.gguf", 1, 4)
            finally:
                loop.call_soon_threadsafe(stopped.set)
        progress("downloading x.gguf", 4, 4)
        return Path("x.gguf")

    monkeypatch.setattr("treadle.hub.download", download, raising=False)
    async with routed(FakeLauncher(), FIXED, own=LIBRARY, copies=CopiedNames()) as router:
        reply = await router.post("/api/pull", {"model": "hf.co/me/good:Q8_0"})
        lines = [json.loads(line) for line in reply.body.splitlines()]
        assert asked == ["hf:me/good:Q8_0"]
        assert (lines[0]["status"], lines[-1]["status"]) == ("pulling manifest", "success")
        assert (lines[1]["completed"], lines[1]["total"]) == (4, 4)
        reply = await router.post("/api/pull", {"model": "me/bad"})
        assert "no such repository" in json.loads(reply.body.splitlines()[-1])["error"]
        assert (await router.post("/api/pull", {"model": "me/bad", "stream": False})).status >= 400
        assert (await router.post("/api/pull", {"model": "llama3"})).status == 400
        client = router.call("POST", "/api/pull", {"model": "me/endless"})
        await until(lambda: len(client.reply.body.splitlines()) > 1)
        client.leave()
        await asyncio.wait_for(stopped.wait(), 60)
        await client.task
        stopped.clear()
        whole = router.call("POST", "/api/pull", {"model": "me/endless", "stream": False})
        await until(lambda: asked.count("hf:me/endless") == 2)
        whole.leave()
        await asyncio.wait_for(stopped.wait(), 60)
        await whole.task


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        (0, 0.0),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        (2.5, 2.5),
        (-1, float("inf")),
        ("-1m", float("inf")),
        ("500ms", 0.5),
    ],
)
def test_keep_alive_in_all_forms(value: Any, seconds: float | None) -> None:
    assert keep_seconds(value) == seconds


@pytest.mark.parametrize("value", ["soon", True, "5 m", [], float("nan")])
def test_keep_alive_of_no_form(value: Any) -> None:
    with pytest.raises(ApiError):
        keep_seconds(value)


@pytest.mark.parametrize("name", ["hf.co/a/b:Q4", "https://huggingface.co/a/b:Q4", "a/b:Q4"])
def test_names_of_the_hub(name: str) -> None:
    assert hub_name(name) == "hf:a/b:Q4"


def test_the_memory_that_a_model_needs(stories: ServedModel) -> None:
    """Its cache is the engine's own, which is as large as options ask for."""
    import treadle

    texts = MemoryRequest(context=2048, n_sequences=2)
    need = need_of(ServedModel("s", stories.ref, cache=texts), None)
    assert need is not None
    assert need.weights == 1185376
    assert need.program == PROGRAM_BYTES
    assert need.least_cache_bytes == need.cache_bytes
    shared = need_of(ServedModel("s", stories.ref, cache=MemoryRequest(n_tokens=32768)), None)
    assert shared is not None
    with treadle.load(stories.ref, threads=1, n_sequences=4, kv_tokens=32768) as model:
        assert shared.cache_bytes == model.engine.cache.n_bytes
    with treadle.load(stories.ref, threads=1, n_sequences=2, context=2048) as model:
        n_bytes = model.engine.cache.n_bytes  # of whole pages
        assert need.cache_bytes == pytest.approx(n_bytes, rel=0.02)
    room = shared.weights + shared.program + 3_000_000
    assert shared.within(room).n_bytes == room
    assert shared.within(0).cache_bytes == shared.least_cache_bytes < 3_000_000
    half = MemoryRequest("q8_0", 2048, 2)
    small = need_of(ServedModel("s", stories.ref, cache=half), None)
    assert small is not None
    assert small.cache_bytes < 0.6 * need.cache_bytes
    draft = MemoryRequest(context=2048, n_sequences=2, files=(stories.ref,))
    both = need_of(ServedModel("s", stories.ref, cache=draft), None)
    assert both is not None
    assert both.weights == 2 * need.weights
    assert need_of(ServedModel("s", "/nowhere.gguf"), None) is None
