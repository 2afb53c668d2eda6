"""The playful samplers of examples/, over a tokenizer of a few pieces and no model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from treadle.sampling import Sampler, Sampling

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Pieces:
    """A tokenizer of words, parts, letters, and two control tokens."""

    texts = (
        *(
            "<s>",
            "</s>",
            " the",
            " bird",
            "s",
            " we",
            "ll",
            "b",
            "a",
            "r",
            "d",
            "ba",
            "bar",
            "bard",
        ),
        *(
            " ",
            ".",
            ", ",
            "W",
            "'",
            " a b",
            " Bob",
            " web",
            "er",
            "the.",
            "é",
            " don't",
            " won't",
            "9",
        ),
    )
    eog = frozenset({1})
    n_vocab = len(texts) + 1  # and half a character

    def token_bytes(self, id: int) -> bytes:
        return b"\xc3" if id == len(self.texts) else self.texts[id].encode()

    def is_control(self, id: int) -> bool:
        return id < 2

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.token_bytes(i) for i in ids if i > 1).decode()


def generate(custom: object, n: int, seed: int, **knobs: object) -> list[int]:
    pieces = Pieces()
    rng = np.random.default_rng(seed)
    settings = Sampling(seed=seed, samplers="temperature", temperature=1.0, custom=custom, **knobs)  # type: ignore[arg-type]
    sampler = Sampler(settings, pieces.n_vocab)
    ids = [0]
    while len(ids) < n and ids[-1] not in pieces.eog:
        x = rng.normal(0, 1, pieces.n_vocab).astype(np.float32)
        x[1] = -9  # seldom the end
        ids.append(sampler.sample(x, ids))
    return ids


@pytest.mark.parametrize("seed", range(20))
def test_only_words_that_start_with_b_or_w(seed: int) -> None:
    custom = load("only_b_or_w").words_starting_with("bw", Pieces())
    ids = generate(custom, 60, seed)
    words = re.findall(r"[\w']+", Pieces().decode(ids))
    assert words
    assert all(word[0] in "bBwW" for word in words), words


@pytest.mark.parametrize("seed", range(20))
def test_every_word_contains_bard(seed: int) -> None:
    custom = load("bard").every_word_contains("bard", Pieces(), longest=8)
    ids = generate(custom, 120, seed)
    words = re.findall(r"\w+", Pieces().decode(ids))
    finished = words if ids[-1] == 1 else words[:-1]
    assert finished
    assert all("bard" in word for word in finished), words


def test_the_least_likely_token() -> None:
    custom = load("least_likely").least_likely(Pieces())
    x = np.linspace(5, -5, Pieces.n_vocab).astype(np.float32)
    x[-1] = -np.inf  # ruled out, not the least likely
    x[1] = -9  # a control token
    sampler = Sampler(Sampling(temperature=0, custom=custom), Pieces.n_vocab)
    assert sampler.sample(x, [0]) == Pieces.n_vocab - 2


def test_words_put_into_the_models_mouth() -> None:
    words = [20, 2, 15]
    ids = generate(load("prefill_reply").put_words(words), 12, 3)
    assert ids[1:4] == words
    others = {tuple(generate(load("prefill_reply").put_words(words), 12, s)[4:]) for s in range(5)}
    assert len(others) == 5  # and then it is free


def test_roles_swapped() -> None:
    swapped = load("swap_roles").swapped
    talk = [
        {"role": "user", "content": "What is a bard?"},
        {"role": "assistant", "content": "A poet."},
    ]
    assert [(m["role"], m["content"]) for m in swapped(talk, "Ask.")] == [
        ("user", "Ask."),
        ("assistant", "What is a bard?"),
        ("user", "A poet."),
    ]
    system = [{"role": "system", "content": "Be brief."}, *talk]
    assert [m["role"] for m in swapped(system)] == ["system", "user", "assistant", "user"]
    assert [m["role"] for m in swapped([])] == ["user"]
    assert talk[0]["role"] == "user"
