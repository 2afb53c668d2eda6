"""No folder of this machine in any answer; characters that a vocabulary lacks, told of."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from tests.tokenizer.vocabularies import NORMAL, letters, write_vocab
from treadle.errors import (
    CacheError,
    CompileError,
    DeviceError,
    FileError,
    GrammarError,
    TemplateError,
    TreadleError,
    UnsupportedError,
)
from treadle.files.gguf import open_gguf
from treadle.grammar.compiled_cache import Grammars
from treadle.server.http.api_errors import ApiError, problem_of
from treadle.server.http.redaction import hide, without_folders, without_paths
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer

HELLO = [{"role": "user", "content": "hi"}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HELLO}),
    ("/v1/embeddings", {"input": "x"}),
    ("/v1/rerank", {"query": "x", "documents": ["y"]}),
    ("/completion", {"prompt": "x", "n_predict": 2}),
    ("/infill", {"input_prefix": "x", "input_suffix": "y", "n_predict": 2}),
    ("/tokenize", {"content": "x"}),
    ("/detokenize", {"tokens": [1]}),
    ("/apply-template", {"messages": HELLO}),
    ("/api/chat", {"messages": HELLO, "stream": False}),
    ("/api/generate", {"prompt": "x", "stream": False}),
    ("/api/embed", {"input": "x"}),
    ("/api/show", {}),
    ("/slots/0?action=restore", {"filename": "absent"}),
    ("/slots/0?action=save", {"filename": "new"}),
    ("/lora-adapters", {}),
]
ASKED = ["/props", "/slots", "/v1/models", "/api/tags", "/api/ps", "/health", "/metrics"]


@pytest.fixture(scope="module")
def client(model: treadle.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("saved")
    with (
        running(model, metrics=True, slot_save_path=folder) as service,
        talking(service, raise_server_exceptions=False) as client,
    ):
        yield client


def folders(model: treadle.Model) -> list[str]:
    own = Path(treadle.__file__).resolve().parent
    found = {model.path.parent, model.path.resolve().parent, own, Path(sys.prefix), Path.home()}
    return [str(path) for path in found if len(path.parts) > 1] + [os.environ["TREADLE_CACHE"]]


@pytest.mark.slow
def test_answers_name_no_folder(model: treadle.Model, client: TestClient) -> None:
    texts = [(path, client.post(path, json=body).text) for path, body in CALLS]
    texts += [(path, client.get(path).text) for path in ASKED]
    for path, output in texts:
        for folder in folders(model):
            assert folder not in output, (path, output)
    assert client.get("/props").json()["model_path"] == model.path.name


def errors(path: Path) -> list[Exception]:
    folder = path.parent
    return [
        FileError("has shrunk", path=path, where="token_embd"),
        FileError("cannot be read", path=folder / "other file.gguf"),
        UnsupportedError(f"{path}: the vocabulary cannot spell it"),
        UnsupportedError(f"no form for {path}"),
        TemplateError(f"cannot start the process that renders chat templates: {path}"),
        GrammarError(f"{path}: not a grammar"),
        TreadleError(f"{path.resolve()}: no"),
        CompileError(f"LLVM refuses /opt/somewhere/kernel.o of {folder}/x"),
        CacheError(f"{folder}/cache: others may write to it"),
        DeviceError("libcuda: /usr/lib/x86_64-linux-gnu/libcuda.so.1: no such file"),
        OSError(2, "No such file", str(path)),
        RuntimeError(str(path)),
    ]


@pytest.mark.parametrize("i", range(12))
def test_errors_of_any_part_name_no_folder(
    i: int, model: treadle.Model, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised while a text is read, or a grammar compiled."""
    error = errors(model.path)[i]

    def fail(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(model.tokenizer, "encode", fail)
    monkeypatch.setattr(model.template, "render", fail)
    for path, body in CALLS:
        answer = client.post(path, json=body)
        for folder in [*folders(model), "/usr/lib", "/opt/some"]:
            assert folder not in answer.text, (path, answer.text)
    problem = problem_of(error)
    assert "/" not in problem.message.replace("and/or", ""), problem.message


def test_a_model_that_broke_is_told_by_its_name(
    model: treadle.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(model) as service, talking(service) as client:
        monkeypatch.setattr(service.engine, "state", "error")
        monkeypatch.setattr(service.engine, "why", str(errors(model.path)[0]))
        for answer in (client.get("/health"), client.post("/completion", json={"prompt": "x"})):
            assert answer.status_code == 500
            assert f"{model.path.name}: token_embd: has shrunk" in answer.text
            assert str(model.path.parent) not in answer.text
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("message", "found"),
    [
        ("/a/b/c.gguf: bad", "c.gguf: bad"),
        ("'/a/b/d.gguf' is bad", "'d.gguf' is bad"),
        ("of /a/b/c and /d/e.o", "of c and e.o"),
        (r"C:\models\x.gguf: bad", "x.gguf: bad"),
        ("5 tokens/s, and/or 1/2", "5 tokens/s, and/or 1/2"),
        ("/", "/"),
        ("", ""),
    ],
)
def test_folders_are_cut(message: str, found: str) -> None:
    assert without_folders(message) == found


def test_a_clients_own_words_stay(tmp_path: Path) -> None:
    hide(tmp_path / "secret" / "m.gguf")
    assert without_paths("/v1/x: no such path /tmp/mine") == "/v1/x: no such path /tmp/mine"
    assert ApiError(400, f"in {tmp_path}/secret/m.gguf: no").message == "in m.gguf: no"


@pytest.fixture
def lacking(model: treadle.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """The model with another vocabulary, which has no piece for the byte 0x16."""
    n = model.config.n_vocab
    pieces = [(letters(bytes([byte])), NORMAL) for byte in range(256) if byte != 0x16]
    pieces += [(f"word{i}", NORMAL) for i in range(n - len(pieces))]
    path = write_vocab(tmp_path / "v.gguf", "gpt2", pieces, merges=[], pre="gpt-2")
    tokenizer = load_tokenizer(open_gguf(path))
    monkeypatch.setitem(vars(model), "tokenizer", tokenizer)
    monkeypatch.setitem(vars(model), "grammars", Grammars(tokenizer))
    return tokenizer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a\x16b"}]}),
        ("/v1/completions", {"prompt": "a\x16b"}),
        ("/v1/responses", {"input": "a\x16b"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a\x16b"}], "max_tokens": 2}),
        ("/completion", {"prompt": "a\x16b"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a\x16b"}]}),
        ("/api/generate", {"prompt": "a\x16b"}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_characters_that_the_vocabulary_lacks(
    path: str, body: dict[str, Any], stream: bool, model: treadle.Model, lacking: Tokenizer
) -> None:
    limits = {
        "max_tokens": 2,
        "max_output_tokens": 2,
        "n_predict": 2,
        "options": {"num_predict": 2},
    }
    with running(model) as service, talking(service) as client:
        answer = client.post(path, json={**limits, **body, "stream": stream})
        assert answer.status_code == 200, answer.text
        told = r"the vocabulary has no token for '\\x16': dropped from the text"
        assert told in answer.text  # as JSON writes it
        found = client.post("/tokenize", json={"content": "a\x16b"})
        assert len(found.json()["tokens"]) == 2
        assert str(lacking.vocab.path.parent) not in answer.text
