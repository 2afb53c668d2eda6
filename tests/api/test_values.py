"""Whatever a caller hands in, a public call works or says which argument is wrong."""

from __future__ import annotations

import copy
import math
import os
import pickle
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.conftest import WriteTiny
from treadle.api.rerank import Reranker
from treadle.base.validate import flag, listed, ranged, token_ids
from treadle.errors import FileError, GrammarError, SamplingError, TreadleError

Call = Callable[[treadle.Model, Any], object]
NO_NUMBER: list[Any] = [1.5, math.nan, math.inf, "3", b"3", [1], {}, object(), np.float32(3), 1j]
NO_NUMBER += [Decimal(2), np.array([1, 2]), True, "", np.array(2.0)]
NO_LIST: list[Any] = [3, 1.5, object(), {}, "ab", b"ab", np.array(3)]
NO_FLAG: list[Any] = ["no", 2, 1.5, [], object(), np.array([1, 2])]
NO_PATH: list[Any] = [3, 1.5, ["a"], {}, object(), np.array([1, 2])]
LOAD: Any = treadle.load  # for arguments that its annotations do not allow
MESSAGES = [{"role": "user", "content": "x"}]


def add(a: int) -> int:
    """A tool."""
    return a


INTEGERS: dict[str, Call] = {
    "n_tokens": lambda m, v: m.plan(v),
    "n_outputs": lambda m, v: m.plan(1, v),
    "n_tokens ": lambda m, v: m.profile(v),
    "depth": lambda m, v: m.profile(1, v),
    "n": lambda m, v: m.session().truncate(v),
    "max_tokens": lambda m, v: m.generate([5], max_tokens=v),
    "logprobs": lambda m, v: m.generate([5], logprobs=v),
    "seed": lambda m, v: m.generate([5], seed=v),
    "a token id": lambda m, v: m.generate([v]),
    "a token id ": lambda m, v: m.session().feed([v]),
    "a token id  ": lambda m, v: m.logits([v]),
    "a token id   ": lambda m, v: m.detokenize([v]),
    "dimensions": lambda m, v: m.embed("a", dimensions=v),
    "reasoning_budget": lambda m, v: m.chat(MESSAGES, reasoning_budget=v),
    "most": lambda m, v: treadle.run_tools(m, MESSAGES, [add], most=v),
    "threads": lambda m, v: treadle.load(threads=v),
    "context": lambda m, v: treadle.load(context=v),
    "n_sequences": lambda m, v: treadle.load(n_sequences=v),
    "kv_bytes": lambda m, v: treadle.load(kv_bytes=v),
    "cache_bytes": lambda m, v: treadle.load(cache_bytes=v),
}
LISTS: dict[str, Call] = {
    "token ids": lambda m, v: m.session().prefill(v),
    "token ids ": lambda m, v: m.session().match(v),
    "token ids  ": lambda m, v: m.states(v),
    "prompts": lambda m, v: m.generate_many(v),
    "messages": lambda m, v: m.chat(v),
    "messages ": lambda m, v: treadle.run_tools(m, v, [add]),
    "tools": lambda m, v: m.chat(MESSAGES, tools=v),
    "tools ": lambda m, v: m.chat_prompt(MESSAGES, tools=v),
    "tools  ": lambda m, v: treadle.run_tools(m, MESSAGES, v),
}
FLAGS: dict[str, Call] = {
    "bos": lambda m, v: m.tokenize("a", bos=v),
    "special": lambda m, v: m.tokenize("a", special=v),
    "special ": lambda m, v: m.detokenize([5], special=v),
    "cache_prompt": lambda m, v: m.generate([5], cache_prompt=v),
    "ignore_eos": lambda m, v: m.generate([5], ignore_eos=v),
    "normalize": lambda m, v: m.embed("a", normalize=v),
    "default_prompt": lambda m, v: m.embed("a", default_prompt=v),
    "parallel": lambda m, v: m.chat(MESSAGES, tools=[add], parallel=v),
    "deterministic": lambda m, v: treadle.load(deterministic=v),
    "speculate": lambda m, v: treadle.load(speculate=v),
}
PATHS: dict[str, Call] = {
    "path": lambda m, v: treadle.load(v),
    "path ": lambda m, v: m.load_session(v),
    "path  ": lambda m, v: fed(m).save(v),
    "draft": lambda m, v: treadle.load(m.path, draft=v),
    "cache_dir": lambda m, v: treadle.load(m.path, cache_dir=v),
}
OTHERS: dict[str, tuple[Call, list[Any]]] = {
    "between": (lambda m, v: m.session().feed([5], between=v), [1, "a", {}]),
    "constraint": (lambda m, v: m.generate([5], constraint=v), [1, "a", {}, np.array([1, 2])]),
    "told": (lambda m, v: treadle.run_tools(m, MESSAGES, [add], told=v), [1, "a"]),
    "model": (lambda m, v: treadle.run_tools(v, MESSAGES, [add]), [None, 3, "a"]),
    "engine": (lambda m, v: treadle.Session(v), [None, 3]),
    "tool_choice": (lambda m, v: m.chat(MESSAGES, tools=[add], tool_choice=v), [1, None, []]),
    "samplers": (lambda m, v: m.generate([5], samplers=v), [None, 3, np.array(3)]),
    "dry_sequence_breakers": (lambda m, v: m.generate([5], dry_sequence_breakers=v), [None, 3]),
    "stop": (lambda m, v: m.generate([5], stop=v), [3, {}, np.array(3), b"a"]),
    "lora": (lambda m, v: treadle.load(m.path, lora=v), [3, [3], np.array(3), np.array([1, 2])]),
    "kv": (lambda m, v: treadle.load(kv=v), [3, [], None, np.array([1, 2])]),
    "isa": (lambda m, v: treadle.load(isa=v), [3, [], np.array([1, 2])]),
}


def fed(model: treadle.Model) -> treadle.Session:
    session = model.session()
    session.feed([5])
    return session


def raises(call: Call, model: treadle.Model, values: list[Any], name: str) -> None:
    for value in values:
        with pytest.raises(TreadleError) as caught:
            call(model, value)
        assert name.strip() in str(caught.value), (value, str(caught.value))


@pytest.mark.parametrize(
    ("calls", "values"),
    [(INTEGERS, NO_NUMBER), (LISTS, NO_LIST), (FLAGS, NO_FLAG), (PATHS, NO_PATH)],
)
def test_a_wrong_type_is_named_by_its_argument(
    calls: dict[str, Call], values: list[Any], tiny: WriteTiny
) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1) as model:
        for name, call in calls.items():
            raises(call, model, values, name)


def test_other_wrong_types_are_named_too(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1) as model:
        for name, (call, values) in OTHERS.items():
            raises(call, model, values, name)
        with pytest.raises(GrammarError, match="the regex is not valid Unicode"):
            model.generate([5], regex="\ud800")


def test_numbers_out_of_range_are_refused_at_the_call(tiny: WriteTiny) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1, context=100) as model:
        for n in (0, -1, 101, 5000, 10**30):
            for call in (model.plan, model.profile):
                with pytest.raises(TreadleError, match=f"n_tokens={n}: expected 1 to 100"):
                    call(n)
        with pytest.raises(TreadleError, match="n_outputs=3: expected 0 to 2"):
            model.plan(2, 3)
        with pytest.raises(TreadleError, match="depth=-1: expected at least 0"):
            model.profile(1, depth=-1)
        with fed(model) as session:
            for n in (-1, 2, 10**30):
                with pytest.raises(TreadleError, match=f"n={n}: expected 0 to 1"):
                    session.truncate(n)
            assert session.ids == [5]


def test_numpys_numbers_are_as_good(tiny: WriteTiny) -> None:
    with LOAD(tiny("llama", "F32"), threads=np.int64(1), context=np.int32(50)) as model:
        assert model.plan(np.int64(3)).n_tokens == model.plan(3).n_tokens
        made = model.generate(np.array([5, 6], np.uint8), max_tokens=np.int16(2), ignore_eos=True)
        made.finish()
        assert len(made.ids) == 2
        assert model.logits(np.array([5, 6])).shape == (2, model.config.n_vocab)
        assert model.tokenize("a", special=np.bool_(True)) == model.tokenize("a", special=1)


def test_single_values() -> None:
    assert flag("x", 1) is flag("x", np.bool_(True)) is True
    assert ranged("x", np.int8(3), 0, 3) == 3
    assert token_ids(iter([1, np.int64(2)])) == [1, 2]

    def broken() -> Any:
        yield 1
        raise TypeError("its own")

    with pytest.raises(TypeError, match="its own"):  # an error of the caller's stays what it is
        listed("x", broken())


def test_a_path_as_bytes_is_a_path(tiny: WriteTiny, tmp_path: Path) -> None:
    with LOAD(os.fsencode(tiny("llama", "F32")), threads=1) as model:
        session: Any = fed(model)
        session.save(os.fsencode(tmp_path / "é.session"))
        assert model.load_session(tmp_path / "é.session").ids == [5]


@pytest.mark.parametrize("name", ["n" * 300, "n" * 300 + ".gguf", "/".join(["d" * 200] * 30)])
def test_a_name_that_is_too_long_is_a_file_error(
    name: str, tiny: WriteTiny, tmp_path: Path
) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1) as model:
        calls: list[Call] = [*PATHS.values(), lambda m, v: treadle.load(m.path, lora=[v])]
        for call in calls:
            with pytest.raises(FileError, match="File name too long"):
                call(model, tmp_path / name)


def test_a_name_that_has_no_bytes_is_a_file_error(tiny: WriteTiny, tmp_path: Path) -> None:
    with treadle.load(tiny("llama", "F32"), threads=1) as model:
        for call in PATHS.values():
            with pytest.raises(FileError, match="its name has no bytes"):
                call(model, f"{tmp_path}/\ud800")


def test_what_is_ranked_is_text() -> None:
    unmade = Reranker.__new__(Reranker)  # the check comes before anything is asked of the model
    with pytest.raises(TreadleError, match="query is int: expected a str"):
        unmade.scores(3, ["a"])  # type: ignore[arg-type]
    with pytest.raises(TreadleError, match="the document is int: expected a str"):
        unmade.scores("a", [3])  # type: ignore[list-item]


def test_sampling_says_which_field_is_wrong() -> None:
    for name in ("samplers", "dry_sequence_breakers", "ignore_eos"):
        with pytest.raises(SamplingError) as caught:
            treadle.Sampling(**{name: 3})  # type: ignore[arg-type]
        assert caught.value.setting == name


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_computed_with_is_not_copied(
    made: Callable[[object], object], tiny: WriteTiny
) -> None:
    """The end of a copy freed the session's pages, and ended the text."""
    with treadle.load(tiny("llama", "F32"), threads=1) as model, fed(model) as session:
        text = model.generate([5], max_tokens=3, ignore_eos=True)
        next(text)
        for one in (session, text):
            with pytest.raises(
                TypeError, match=f"a {type(one).__name__} cannot be pickled or copied"
            ):
                made(one)
        text.finish()
        assert (len(text.ids), session.ids) == (3, [5])
