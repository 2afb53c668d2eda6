"""What a chain makes of a row's largest logits is what it makes of the whole row, bit for bit."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from treadle.engine.logits import (
    N_TOP,
    TOTAL_ERROR,
    LogitsBatch,
    LogitsQuery,
    LogitsRow,
    TopLogits,
)
from treadle.errors import GrammarError, NotFiniteError, SamplingError
from treadle.kernels.run_state import TOTAL
from treadle.sampling import Sampler, Sampling
from treadle.sampling.candidates import Floats

N = 500
EOG = {3, 490}


def top_of(x: np.ndarray, query: LogitsQuery, off: float) -> TopLogits:
    """The answer to a query, as a kernel writes it. ``off``: the error of the sum, as a share of
    what is allowed.
    """
    if query.mask is not None:
        mask = query.mask if isinstance(query.mask, bytes) else query.mask.wait()
        bits = np.frombuffer(mask.ljust(-(-len(x) // 8), b"\0"), np.uint8)
        allowed = np.unpackbits(bits, count=len(x), bitorder="little").astype(bool)
        x = np.where(allowed | ~(x < np.inf), x, np.float32(-np.inf))
    order = np.argsort(-x, kind="stable")[: 1 if query.first else N_TOP]
    values = np.full(N_TOP, -np.inf, np.float32)
    ids = np.full(N_TOP, -1, np.int32)
    values[: len(order)] = x[order]
    ids[: len(order)] = order
    total = math.nan  # the sum is undefined unless it is queried
    if query.total:
        total = float(np.exp(x.astype(np.float64) - x.max()).sum()) * (1 + off * TOTAL_ERROR)
    data = values.tobytes() + ids.tobytes()
    return TopLogits(data.ljust(TOTAL, b"\0") + np.float64(total).tobytes(), 0)


class Row(LogitsRow):
    """A row that counts the copies of all of it."""

    def __init__(self, x: np.ndarray, query: LogitsQuery | None, off: float = 0.0) -> None:
        queries = () if query is None else (query,)
        self.x = x
        batch = LogitsBatch(lambda: self.x[None], b"", [queries], nullcontext())
        super().__init__(batch, 0, [top_of(x, query, off) for query in queries], queries)
        self.n_whole = 0

    def logits(self) -> Floats:
        self.n_whole += 1
        return super().logits()


class Allows:
    """A grammar with these tokens alone, at every place."""

    def __init__(self, allowed: np.ndarray, *, bits: bool) -> None:
        self.allowed, self.accepted = allowed, list[int]()
        if bits:
            made = np.packbits(allowed, bitorder="little").tobytes()
            self.start_bits = lambda: SimpleNamespace(wait=lambda: made)

    def mask(self, logits: np.ndarray) -> None:
        logits[~self.allowed] = -np.inf

    def accept(self, id: int) -> None:
        self.accepted.append(id)


def rows_of(seed: int, shape: str, n: int = 12) -> np.ndarray:
    """Logits of several tokens: as models have them, flat, with ties, with few left."""
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 3, (n, N))
    if shape == "flat":
        x /= 100
    elif shape == "sharp":
        x *= 4
    elif shape == "ties":
        x = np.round(x)
    elif shape == "few":
        x[:, 20:] = -np.inf
    return x.astype(np.float32)


def texts(
    settings: Sampling, x: np.ndarray, off: float, allowed: np.ndarray | None
) -> tuple[list[Any], list[Any], int]:
    """The tokens by the largest and by whole rows, or the errors; how often all was asked for."""
    both: list[list[Any]] = []
    n_whole = 0
    for top in (True, False):
        constraint = None if allowed is None else Allows(allowed, bits=True)
        sampler = Sampler(settings, N, eog=EOG, constraint=constraint)
        ids: list[Any] = [7, 9, 7]
        for row in x:
            try:
                if top:
                    given_row = Row(row, sampler.query(), off)
                    ids.append(sampler.choose(given_row, ids))
                    n_whole += given_row.n_whole
                else:
                    ids.append(sampler.sample(row, ids))
            except SamplingError as error:
                ids.append(len(str(error)))
                both.append([*ids, str(error)])
                break
        else:
            both.append([*ids, None if constraint is None else constraint.accepted])
    return both[0], both[1], n_whole


STAGES = ["penalties", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
KNOBS = {
    "temperature": st.sampled_from([0.0, 1e-30, 0.3, 0.8, 1.0, 2.5]),
    "dynatemp_range": st.sampled_from([0.0, 0.5]),
    "top_k": st.sampled_from([0, 1, 5, 40, 64, 65, 100]),
    "top_p": st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    "typical_p": st.sampled_from([1.0, 0.9]),
    "top_n_sigma": st.sampled_from([-1.0, 1.0]),
    "min_keep": st.sampled_from([0, 3, 70]),
    "xtc_probability": st.sampled_from([0.0, 0.5]),
    "repeat_penalty": st.sampled_from([1.0, 1.3, 0.7]),
    "presence_penalty": st.sampled_from([0.0, 0.5, -0.5]),
    "frequency_penalty": st.sampled_from([0.0, 30.0]),
    "dry_multiplier": st.sampled_from([0.0, 2.0]),
    "mirostat": st.sampled_from([0, 0, 0, 2]),
    "logit_bias": st.dictionaries(
        st.integers(0, N - 1), st.sampled_from([-math.inf, -3.0, 0.0, 2.0, 100.0]), max_size=5
    ),
    "ignore_eos": st.booleans(),
    "samplers": st.one_of(
        st.just([*STAGES[:1], "dry", *STAGES[1:]]),
        st.lists(st.sampled_from([*STAGES, "dry", "adaptive_p"]), max_size=5, unique=True),
    ),
    "adaptive_target": st.sampled_from([-1.0, 0.3]),
}


@pytest.mark.slow
@example(  # a token that is ruled out beyond the largest: the sum over the others is less
    {"logit_bias": {0: -math.inf}, "samplers": ["top_p"]}, 4, "normal", 0.0, None
)
@given(
    st.fixed_dictionaries({}, optional=KNOBS),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["normal", "flat", "sharp", "ties", "few"]),
    st.floats(-1, 1),
    st.sampled_from([None, 0.5, 0.02]),
)
def test_the_same_text_from_the_largest_logits(
    knobs: dict[str, Any], seed: int, shape: str, off: float, share: float | None
) -> None:
    """Whatever the settings, and whatever error within its bound the sum has."""
    settings = Sampling(seed=seed, dry_sequence_breakers=(), **knobs)
    allowed = None if share is None else np.random.default_rng(seed + 1).random(N) < share
    by_top, by_row, _ = texts(settings, rows_of(seed, shape), off, allowed)
    assert by_top == by_row


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"temperature": 0},
        {"temperature": 0, "ignore_eos": True, "repeat_penalty": 1.1},
        {"repeat_penalty": 1.2, "presence_penalty": 0.3, "dry_multiplier": 0.8},
        {"logit_bias": {5: 4.0, 6: -math.inf}},
        {"xtc_probability": 0.5, "typical_p": 0.9, "samplers": "top_k;typ_p;xtc;temperature"},
        {"samplers": "top_p;temperature", "top_p": 0.7},
        {"samplers": "min_p;top_p;temperature"},
        {"samplers": "temperature;top_k"},
        {"samplers": "top_k;custom;temperature", "custom": lambda x, ids: x / 2},
    ],
)
@pytest.mark.parametrize("constrained", [False, True])
def test_these_need_no_more(knobs: dict[str, Any], constrained: bool) -> None:
    """The usual chains never ask for the whole row, where a model knows what it wants."""
    if constrained and "logit_bias" in knobs:
        pytest.skip("a token that is raised and may be ruled out needs the row")
    settings = Sampling(seed=1, dry_sequence_breakers=(), **knobs)
    allowed = np.arange(N) % 3 > 0 if constrained else None
    by_top, by_row, n_whole = texts(settings, rows_of(5, "sharp", 40), 1.0, allowed)
    assert by_top == by_row
    assert n_whole == 0


@pytest.mark.parametrize(
    "knobs",
    [
        {"custom": lambda x, ids: x},
        {"mirostat": 1},
        {"samplers": "temperature"},
        {"samplers": "temperature;typ_p", "typical_p": 0.5},
        {"samplers": "top_n_sigma;top_k", "top_n_sigma": 1},
        {"top_k": 65},
        {"repeat_penalty": 0.9},
    ],
)
def test_these_ask_for_the_row_at_once(knobs: dict[str, Any]) -> None:
    assert Sampler(Sampling(**knobs), N).query() is None


def test_what_the_largest_cannot_tell() -> None:
    """Each falls back to the row: penalties that take too many, a nucleus beyond the largest, a
    sum whose error decides.
    """
    row = np.sort(rows_of(1, "normal", 1)[0])[::-1].copy()
    chains: list[tuple[Sampling, list[int]]] = [
        (Sampling(seed=1, presence_penalty=50.0), list(range(60))),
        (Sampling(seed=1, samplers="top_p;temperature", top_p=0.9999), [0]),
        (Sampling(seed=1, samplers="min_p;temperature", min_p=1e-6), [0]),
        (Sampling(temperature=0, presence_penalty=500.0), list(range(64))),
        (Sampling(seed=1, samplers="temperature;top_p", top_p=0.5), [0]),
    ]
    p = np.exp(row.astype(np.float64) - row.max())
    edge = float(np.cumsum(p)[2] / p.sum())
    chains.append((Sampling(seed=1, samplers="top_p", top_p=edge), [0]))
    for settings, ids in chains:
        sampler = Sampler(settings, N)
        given_row = Row(row, sampler.query())
        assert given_row.top is not None
        token = sampler.choose(given_row, ids)
        assert given_row.n_whole == 1
        assert token == Sampler(settings, N).sample(row, ids)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [(np.nan, "logits: NaN at token 400"), (np.inf, "logits: \\+inf at token 400")],
)
@pytest.mark.parametrize("t", [0, 0.8])
@pytest.mark.parametrize("constrained", [False, True])
def test_no_numbers_are_named(spoil: float, words: str, t: float, constrained: bool) -> None:
    row = rows_of(2, "normal", 1)[0]
    row[400] = np.inf  # as the kernel, the fake shows what is no number first
    constraint = Allows(np.arange(N) < 100, bits=True) if constrained else None
    sampler = Sampler(Sampling(temperature=t), N, constraint=constraint)
    given_row = Row(row, sampler.query())
    given_row.x = np.where(row < np.inf, row, np.float32(spoil))
    with pytest.raises(NotFiniteError, match=words):
        sampler.choose(given_row, [1])


def test_every_token_ruled_out() -> None:
    sampler = Sampler(Sampling(), N, constraint=Allows(np.zeros(N, bool), bits=True))
    with pytest.raises(SamplingError, match="grammar's mask: every token"):
        sampler.choose(Row(rows_of(1, "normal", 1)[0], sampler.query()), [1])


def test_a_constraint_without_bits_gets_the_row() -> None:
    allowed = np.arange(N) == 77
    sampler = Sampler(Sampling(), N, constraint=Allows(allowed, bits=False))
    assert sampler.query() is None
    assert sampler.choose(Row(rows_of(1, "normal", 1)[0], None), [1]) == 77


def test_an_error_of_the_grammars_comes_when_the_row_is_there() -> None:
    class Stuck(Allows):
        def mask(self, logits: np.ndarray) -> None:
            raise GrammarError("stuck")

    constraint = Stuck(np.zeros(N, bool), bits=False)
    constraint.start_bits = lambda: SimpleNamespace(wait=lambda: b"")
    sampler = Sampler(Sampling(), N, constraint=constraint)
    with pytest.raises(GrammarError, match="stuck"):
        sampler.choose(Row(rows_of(1, "normal", 1)[0], sampler.query()), [1])


def test_a_small_vocabulary_is_looked_at_as_a_whole() -> None:
    assert Sampler(Sampling(), N_TOP).query() is None
    assert Sampler(Sampling(), N_TOP + 1).query() == LogitsQuery()
    assert Sampler(Sampling(temperature=0), N).query() == LogitsQuery(first=True)
    assert Sampler(Sampling(samplers="top_p"), N).query() == LogitsQuery(total=True)
