"""Keyword arguments of other programs: what the errors suggest in their place."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import treadle
from treadle.api.model import SETTINGS, Model
from treadle.base.foreign_keywords import (
    ADVICE,
    CHAT_SETTINGS,
    GENERATE_SETTINGS,
    LOAD_SETTINGS,
    RENAMED,
)

LOAD = inspect.signature(treadle.load).parameters.keys()
CHAT = inspect.signature(Model.chat).parameters.keys()
TOKENIZE = inspect.signature(Model.tokenize).parameters.keys()


def test_each_name_stands_for_a_keyword() -> None:
    ours = {*LOAD, *SETTINGS, *CHAT, *CHAT_SETTINGS, *TOKENIZE}
    assert set(RENAMED.values()) <= ours
    assert not (RENAMED.keys() | ADVICE.keys()) & ours
    assert not RENAMED.keys() & ADVICE.keys()
    assert LOAD_SETTINGS.keys() == LOAD
    assert list(Model.generate.__kwdefaults__ or ()) == GENERATE_SETTINGS


LLAMA_CPP_PYTHON = {
    "n_ctx": "did you mean 'context'",
    "n_threads": "did you mean 'threads'",
    "n_predict": "did you mean 'max_tokens'",
    "contxt": "did you mean 'context'",
    "n_gpu_layers": "leave it out: models run on the CPU",
    "verbose": "leave it out",
    "temp": r"'temperature' is a setting of generate\(\).*load\(sampling=",
    "top_p": r"it is a setting of generate\(\).*load\(sampling=",
    "stop": r"it is a setting of generate\(\)",
    "tools": r"it is a setting of chat\(\)",
}


@pytest.mark.parametrize("name", LLAMA_CPP_PYTHON)
def test_load(name: str) -> None:
    """The error comes before the file is opened."""
    load: Any = treadle.load
    said = f"load\\(\\) got an unexpected keyword argument '{name}'; {LLAMA_CPP_PYTHON[name]}"
    with pytest.raises(TypeError, match=said):
        load("no such file", **{name: 1})
    with pytest.raises(TypeError, match=said):
        treadle.load_shared("no such file", **{name: 1})


def test_no_hint_without_a_similar_name() -> None:
    load: Any = treadle.load_speech
    with pytest.raises(TypeError, match=r"argument 'zzz'$"):
        load("no such file", zzz=1)


def test_sampling() -> None:
    sampling: Any = treadle.Sampling
    for name, said in (
        ("temp", "did you mean 'temperature'"),
        ("temprature", "did you mean 'temperature'"),
        ("max_tokens", r"it is a setting of generate\(\)"),
        ("n_ctx", r"'context' is a setting of load\(\)"),
    ):
        with pytest.raises(TypeError, match=f"Sampling\\(\\) got .* '{name}'; {said}"):
            sampling(**{name: 1})
    load: Any = treadle.load
    with pytest.raises(TypeError, match=r"sampling: 'temp' is not a field .*'temperature'"):
        load(sampling={"temp": 1})


def test_classes_of_other_libraries() -> None:
    with pytest.raises(AttributeError, match=r"'Llama': treadle.load\(path\) opens a model"):
        treadle.Llama  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'laod'$") as raised:
        treadle.laod  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("laod", treadle)
    model: Any = treadle.Model
    for settings in ({}, {"n_ctx": 512}):
        with pytest.raises(TypeError, match=r"treadle.load\(path\) opens a model"):
            model("model.gguf", **settings)
