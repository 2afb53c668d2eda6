"""Errors leave a process whole: pickled, copied, and through a pool of processes."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pickle
import pkgutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

import treadle
from treadle.errors import FileError, TreadleError

WAIT_S = 60  # for two processes to start: they take one or two seconds


def load_everything() -> None:
    """Import every module, so that errors outside ``errors.py`` are known too."""
    for module in pkgutil.walk_packages(treadle.__path__, "treadle."):
        if module.name.startswith("treadle.distributed.cluster.") and find_spec("ray") is None:
            continue  # make test installs no Ray
        if module.name == "treadle.mcp.client" and find_spec("mcp") is None:
            continue  # nor the package of MCP
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def subclasses(cls: type[TreadleError]) -> Iterator[type[TreadleError]]:
    yield cls
    for below in cls.__subclasses__():
        yield from subclasses(below)


@pytest.fixture(scope="module")
def every() -> list[type[TreadleError]]:
    """All errors of the package. Not when tests are collected: each process does that, and modules
    take seconds to import.
    """
    load_everything()
    found = {cls for cls in subclasses(TreadleError) if cls.__module__.startswith("treadle.")}
    return sorted(found, key=lambda cls: cls.__name__)


# What an __init__ of one of them may ask for by name; a new error adds its own here.
GIVEN: dict[str, Any] = {
    "path": Path("a/m.gguf"),
    "offset": 24,
    "where": "t",
    "expected": "Q8_0",
    "status": 503,
}


def made(cls: type[TreadleError]) -> TreadleError:
    asked = signature(cls.__init__).parameters.values()
    named = {p.name: GIVEN[p.name] for p in asked if p.kind is Parameter.KEYWORD_ONLY}
    error = cls("cut short: naïve 猫", **named)
    error.noted = ["by the caller"]  # type: ignore[attr-defined]
    return error


def pickled(protocol: int) -> Callable[[TreadleError], TreadleError]:
    def through(error: TreadleError) -> TreadleError:
        back = pickle.loads(pickle.dumps(error, protocol))
        assert isinstance(back, TreadleError)
        return back

    return through


WAYS: dict[str, Callable[[TreadleError], TreadleError]] = {
    **{f"pickle {n}": pickled(n) for n in range(pickle.HIGHEST_PROTOCOL + 1)},
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_error_stays_what_it_is(
    way: Callable[[TreadleError], TreadleError], every: list[type[TreadleError]]
) -> None:
    for cls in every:
        error = made(cls)
        back = way(error)
        assert back is not error
        assert type(back) is cls
        assert (str(back), back.args, vars(back)) == (str(error), error.args, vars(error))
        assert str(back)
        again = way(back)  # what was unpickled is pickled again by the next process
        assert str(again) == str(error)


def test_every_error_was_found(every: list[type[TreadleError]]) -> None:
    assert {"TreadleError", "FileError", "SamplingError", "CacheError"} <= {
        cls.__name__ for cls in every
    }


def test_the_attributes_of_a_file_error() -> None:
    back = pickle.loads(pickle.dumps(made(FileError)))
    assert (back.path, back.offset) == ("a/m.gguf", 24)
    assert (back.where, back.expected) == ("t", "Q8_0")
    assert str(back) == "a/m.gguf at byte 24: t: cut short: naïve 猫 (expected Q8_0)"


def n_ctx_of(path: str | None) -> int:
    with treadle.load(path, threads=1) as model:
        return model.n_ctx


@pytest.mark.slow
def test_a_pool_hands_over_the_error_of_a_missing_file(tmp_path: Path) -> None:
    """It hung for ever: the error could not be unpickled where the results are collected."""
    missing = str(tmp_path / "no.gguf")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        waiting = pool.map_async(n_ctx_of, [None, missing, None], chunksize=1)
        with pytest.raises(FileError, match="no such file") as caught:
            waiting.get(WAIT_S)
    assert caught.value.path == missing
