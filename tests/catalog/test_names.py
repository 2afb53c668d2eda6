"""Short names: which model one means, and the name that each model gets."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.catalog.hub_cache import A, B, put
from treadle.catalog.names import (
    find_named,
    fitting,
    has_parts,
    is_whole_name,
    name_models,
    similar_names,
)
from treadle.catalog.stored import find_stored
from treadle.errors import FileError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen3-0.6b", "qwen3-0.6b-instruct"),
        ("qwen", "qwen3-0.6b"),
        ("qwen3", "qwen3-0.6b"),
        ("qwen-0.6b", "qwen3-0.6b"),
        ("qwen3:0.6b", "qwen3-0.6b"),
        ("gemma3", "gemma-3-4b-it"),
        ("gemma-3", "gemma3-4b"),
        ("llama-1b", "llama-3.2-1b-instruct"),
        ("inst", "llama-3.2-1b-instruct"),
        ("qwen3-0.6b-q8_0", "qwen3-0.6b q8_0"),
        ("qwen3:q8", "qwen3-0.6b q8_0"),
        ("qwen3-0.6", "qwen3-0.6b"),
    ],
)
def test_parts_in_their_order(text: str, name: str) -> None:
    assert has_parts(text, name)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("qwen2", "qwen2.5-7b"),  # another family
        ("qwen-3b", "qwen-3-8b"),
        ("3b", "qwen3-0.6b"),
        ("instruct-llama", "llama-3.2-1b-instruct"),
        ("llama-3", "llama-3.2-1b"),
        ("7b", "70b"),
        ("q4", "qwen3 iq4_xs"),
        ("q4_0", "qwen3 q4_k_m"),
        ("wen", "qwen3"),
        ("", "qwen3"),
        ("--", "qwen3"),
    ],
)
def test_parts_that_are_not_there(text: str, name: str) -> None:
    assert not has_parts(text, name)


NAME = st.lists(st.sampled_from(["qwen3", "0.6b", "it", "q8_0", "coder"]), min_size=1, max_size=4)


@given(NAME, st.data())
def test_a_name_without_some_of_its_parts_still_fits(parts: list[str], data: st.DataObject) -> None:
    kept = [part for part in parts if data.draw(st.booleans())]
    assert has_parts("-".join(kept), "-".join(parts)) == bool(kept)
    assert not has_parts("-".join([*parts, "more"]), "-".join(parts))


@pytest.fixture
def store(root: Path) -> Path:
    put(root, "Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": b"1"})
    put(root, "Qwen/Qwen3-4B-GGUF", {"Qwen3-4B-Q8_0.gguf": b"2", "Qwen3-4B-Q4_K_M.gguf": b"3"})
    put(root, "u/Qwen3-4B-Instruct-GGUF", {"Qwen3-4B-Instruct-Q8_0.gguf": b"4"})
    put(root, "bartowski/Llama-3.2-1B-GGUF", {"Llama-3.2-1B-Q8_0.gguf": b"5"})
    put(root, "unsloth/Llama-3.2-1B-GGUF", {"Llama-3.2-1B-Q8_0.gguf": b"6"})
    put(root, "google/gemma-3-1b-it", {"config.json": b"{}", "model.safetensors": b"7"})
    return root


def test_each_model_gets_the_shortest_name_that_means_it(store: Path) -> None:
    assert [each.name for each in name_models(find_stored())] == [
        "gemma-3-1b-it",
        "bartowski/llama-3.2-1b",
        "unsloth/llama-3.2-1b",
        "qwen3-0.6b",
        "qwen3-4b:q4_k_m",
        "qwen3-4b:q8_0",
        "qwen3-4b-instruct",
    ]


def test_every_name_means_its_model(store: Path) -> None:
    """Also those of an older revision, of an unnamed file, and of two files of one name."""
    put(store, "Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": b"old"}, B, main=False)
    put(store, "o/plain", {"a/model.gguf": b"8", "b/model.gguf": b"9"})
    for each in name_models(find_stored()):
        found = find_named(each.name)
        if found is None:  # a path or a name on the hub, which need no look-up
            assert each.name.startswith(("/", "hf:"))
        else:
            assert found.model == each.model


@pytest.mark.parametrize(
    ("text", "file"),
    [
        ("qwen3-0.6b", "Qwen3-0.6B-Q8_0.gguf"),
        ("QWEN3-0.6B", "Qwen3-0.6B-Q8_0.gguf"),
        ("qwen3-0.6b:q8_0", "Qwen3-0.6B-Q8_0.gguf"),
        ("qwen3-0.6b-Q8_0", "Qwen3-0.6B-Q8_0.gguf"),
        ("qwen3-0.6b:latest", "Qwen3-0.6B-Q8_0.gguf"),
        ("Qwen/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q8_0.gguf"),
        ("Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0.gguf"),
        ("qwen3-4b:q4_k_m", "Qwen3-4B-Q4_K_M.gguf"),
        ("qwen3-4b:q4", "Qwen3-4B-Q4_K_M.gguf"),
        ("4b-instruct", "Qwen3-4B-Instruct-Q8_0.gguf"),
        ("unsloth/llama", "Llama-3.2-1B-Q8_0.gguf"),
        ("gemma", "a" * 40),
    ],
)
def test_what_a_name_means(store: Path, text: str, file: str) -> None:
    found = find_named(text)
    assert found is not None
    assert found.model.path.name == file


@pytest.mark.parametrize(
    ("text", "candidates"),
    [
        ("qwen3-4b", "qwen3-4b:q4_k_m, qwen3-4b:q8_0:"),  # not the one with -instruct
        ("llama", "bartowski/llama-3.2-1b, unsloth/llama-3.2-1b:"),
        ("qwen", "qwen3-0.6b, qwen3-4b:q4_k_m, qwen3-4b:q8_0, qwen3-4b-instruct:"),
    ],
)
def test_a_name_that_fits_several_lists_them(store: Path, text: str, candidates: str) -> None:
    with pytest.raises(FileError, match=f"{text}: fits . downloaded models: {candidates} name"):
        find_named(text)


@pytest.mark.parametrize(
    "text",
    [
        *("./qwen3-0.6b", "/qwen3-0.6b", "~/qwen", "hf:Qwen/Qwen3-0.6B-GGUF", "a/b/qwen3"),
        *("", "a\nb", "qwen3-0.gguf", "x" * 300, "mistral", "nobody/qwen3-0.6b"),
    ],
)
def test_what_means_no_model(store: Path, text: str) -> None:
    assert find_named(text) is None


def test_an_older_revision_is_meant_only_with_its_commit(store: Path) -> None:
    put(store, "Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": b"old"}, B, main=False)
    new = find_named("qwen3-0.6b")
    old = find_named("qwen3-0.6b@bbbbbbb")
    assert new is not None
    assert old is not None
    assert (new.model.commit, old.model.commit) == (A, B)


def test_only_a_whole_name_is_a_model_and_not_a_prompt(store: Path) -> None:
    assert is_whole_name("Qwen3-0.6B")
    assert is_whole_name("qwen3-0.6b:q8_0")
    assert not is_whole_name("qwen")
    assert not is_whole_name("Once")


def test_similar_names(store: Path) -> None:
    assert similar_names("qwen3-7b")[0] in ("qwen3-4b:q8_0", "qwen3-0.6b")
    assert similar_names("zzz") == []


def test_an_unfinished_download_says_how_to_go_on(root: Path) -> None:
    put(root, "o/big-GGUF", {"big-00001-of-00002.gguf": b"x"})
    go_on = "go on with `treadle pull hf:o/big-GGUF/big-00001-of-00002.gguf`"
    with pytest.raises(FileError, match=go_on):
        find_named("big")
    assert len(fitting("big", find_stored())) == 1
