"""The whole chain: order, greedy, seeds, custom samplers, grammars, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import NotFiniteError, SamplingError
from treadle.sampling import DEFAULT_ORDER, Sampler, Sampling
from treadle.sampling.candidates import Candidates, temperature
from treadle.sampling.repetition import dry, penalties
from treadle.sampling.truncation import min_p, top_k, top_n_sigma, top_p, typical

GOLDEN = [15, 10, 15, 13, 12, 13, 11, 8, 15, 15, 12, 7]

EVERYTHING: dict[str, Any] = {
    "repeat_penalty": 1.2,
    "dry_multiplier": 0.8,
    "dry_sequence_breakers": (),
    "top_n_sigma": 2.0,
    "typical_p": 0.9,
    "xtc_probability": 0.5,
}


def some_logits(n: int = 300, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, n).astype(np.float32)


def text(settings: Sampling, n: int = 40) -> list[int]:
    """Tokens of a model whose logits depend on the last token."""
    sampler = Sampler(settings, 300)
    ids = [1]
    for _ in range(n):
        ids.append(sampler.sample(some_logits(seed=ids[-1]), ids))
    return ids[1:]


def test_the_default_chain() -> None:
    assert Sampler(Sampling(), 10).chain == ("top_k", "top_p", "min_p", "temperature", "dist")


def test_the_whole_chain_in_llama_cpps_order() -> None:
    sampler = Sampler(Sampling(**EVERYTHING), 10)
    assert sampler.chain == (
        *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
        *("temperature", "dist"),
    )


def test_samplers_run_in_the_order_they_are_named_and_only_those() -> None:
    order = "temperature;min_p;penalties;top_k"
    assert Sampler(Sampling(samplers=order, **EVERYTHING), 10).chain == (
        *("temperature", "min_p", "penalties", "top_k", "dist"),
    )


def test_what_comes_first() -> None:
    class Anything:
        def mask(self, logits: np.ndarray) -> None: ...
        def accept(self, id: int) -> None: ...

    settings = Sampling(samplers="", custom=lambda x, ids: x, logit_bias={1: 1.0})
    assert Sampler(settings, 10, constraint=Anything()).chain == (
        *("custom", "logit_bias", "constraint", "dist"),
    )


@pytest.mark.slow
def test_the_chain_is_its_stages_one_after_the_other() -> None:
    x = some_logits()
    ids = [5, 9, 5, 9, 5]
    settings = Sampling(
        seed=4,
        repeat_penalty=1.3,
        presence_penalty=0.2,
        dry_multiplier=1.0,
        dry_sequence_breakers=(),
        top_n_sigma=2.5,
        typical_p=0.95,
        samplers="penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;temperature",
    )
    c = penalties(Candidates(x), ids, 1.3, 0.0, 0.2)
    c = dry(c, ids, 1.0, 1.75, 2, {})
    c = top_n_sigma(c, 2.5)
    c = top_k(c, 40)
    c = typical(c, 0.95)
    c = top_p(c, 0.95)
    c = min_p(c, 0.05)
    c = temperature(c, 0.8)
    p = np.exp(c.logits.astype(np.float64))
    counts = dict.fromkeys(range(300), 0)
    sampler = Sampler(settings, 300)
    for _ in range(8000):
        counts[sampler.sample(x, ids)] += 1
    expected = {c.token(i): v for i, v in enumerate(p / p.sum() * 8000)}
    assert {t for t, n in counts.items() if n} <= set(expected)
    chi = sum((counts[t] - e) ** 2 / e for t, e in expected.items())
    assert chi < len(expected) + 5 * (2 * len(expected)) ** 0.5  # five sigma


def test_order_matters_where_it_should() -> None:
    # p = .4 .3 .2 .1: min-p after temperature sees a flatter distribution than before it
    x = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    tokens = {
        order: {
            Sampler(Sampling(seed=s, samplers=order, temperature=4, min_p=0.6), 4).sample(x, [0])
            for s in range(100)
        }
        for order in ("min_p;temperature", "temperature;min_p")
    }
    assert tokens == {"min_p;temperature": {0, 1}, "temperature;min_p": {0, 1, 2, 3}}


def test_the_same_seed_gives_the_same_text() -> None:
    settings = Sampling(seed=11, **EVERYTHING)
    assert text(settings) == text(settings)
    assert text(settings) != text(Sampling(seed=12, **EVERYTHING))


def test_the_text_of_a_seed_does_not_change_between_versions() -> None:
    x = np.arange(16, dtype=np.float32) / 4  # exact in float32: the same on every machine
    sampler = Sampler(Sampling(seed=42, top_p=1.0), 16)
    assert [sampler.sample(x, []) for _ in range(12)] == GOLDEN


def test_the_seed_that_was_used_reproduces_the_text() -> None:
    x = some_logits()
    sampler = Sampler(Sampling(), 300)
    first = [sampler.sample(x, []) for _ in range(20)]
    again = Sampler(Sampling(seed=sampler.seed), 300)
    assert [again.sample(x, []) for _ in range(20)] == first


@pytest.mark.parametrize("mirostat", [0, 1, 2])
def test_reset_starts_over(mirostat: int) -> None:
    sampler = Sampler(
        Sampling(seed=3, mirostat=mirostat, samplers="top_k;adaptive_p", adaptive_target=0.2), 300
    )
    first = [sampler.sample(some_logits(seed=i), [i]) for i in range(20)]
    sampler.reset()
    assert [sampler.sample(some_logits(seed=i), [i]) for i in range(20)] == first


@pytest.mark.parametrize("t", [0, -1])
def test_greedy_is_the_argmax_and_nothing_else(t: float) -> None:
    sampler = Sampler(Sampling(temperature=t), 300)
    assert sampler.chain == ("greedy",)
    assert sampler.sample(some_logits(), [1]) == int(some_logits().argmax())


@given(
    st.integers(0, 1000),
    st.permutations(["penalties", "top_k", "typ_p", "top_p", "min_p", "xtc", "top_n_sigma"]),
    st.integers(0, 7),
)
def test_greedy_is_the_limit_of_a_low_temperature(seed: int, order: list[str], at: int) -> None:
    # Penalties are relative to the logits' size, which temperature changes: they come before it.
    rest = [name for name in order[at:] if name != "penalties"]
    samplers = [name for name in order if name not in rest] + ["temperature", *rest]
    knobs = {**EVERYTHING, "xtc_probability": 1.0, "samplers": samplers, "seed": 1, "top_k": 5}
    x = some_logits(seed=seed)
    ids = [3, 4, int(some_logits(seed=seed).argmax())]
    cold = Sampler(Sampling(temperature=1e-6, **knobs), 300)
    greedy = Sampler(Sampling(temperature=0, **knobs), 300)
    assert greedy.chain[-1] == "greedy"
    assert greedy.sample(x, ids) == cold.sample(x, ids)


def test_mirostat_runs_alone_but_for_temperature_bias_and_custom() -> None:
    settings = Sampling(mirostat=2, logit_bias={1: 2.0}, dynatemp_range=0.5, **EVERYTHING)
    assert Sampler(settings, 10).chain == ("logit_bias", "temperature", "mirostat")
    assert Sampler(Sampling(mirostat=1, temperature=0), 10).chain == ("greedy",)


def test_adaptive_p_acts_last_wherever_it_is_named() -> None:
    settings = Sampling(samplers="adaptive_p;min_p", adaptive_target=0.3)
    assert Sampler(settings, 10).chain == ("min_p", "adaptivep")
    assert Sampler(Sampling(adaptive_target=0.3), 10).chain[-1] == "dist"  # as llama.cpp


def test_infill_ends_a_text_where_nothing_is_sure() -> None:
    class Words:
        n_vocab = 8

        def token_bytes(self, id: int) -> bytes:
            return b"w%d" % id

        def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
            return []

    x = np.zeros(8, np.float32)
    x[6] = -9
    settings = Sampling(samplers="infill", seed=1)
    sampler = Sampler(settings, 8, eog=[6], tokenizer=Words())
    assert sampler.chain == ("infill", "dist")
    assert sampler.sample(x, []) == 6
    kept = dataclasses.replace(settings, ignore_eos=True)
    assert Sampler(kept, 8, eog=[6], tokenizer=Words()).sample(x, []) == 0
    with pytest.raises(SamplingError, match="infill needs the tokenizer"):
        Sampler(settings, 8)


def test_penalties_look_back_as_far_as_they_are_told() -> None:
    x = np.array([0, 0, 0, 0.5], np.float32)
    for n, expected in ((0, 3), (1, 0), (3, 0), (4, 0), (6, 3), (-1, 3)):  # 3: all pay the same
        settings = Sampling(temperature=0, presence_penalty=1.0, repeat_last_n=n)
        assert Sampler(settings, 4).sample(x, [0, 1, 2, 3, 3, 3]) == expected


def test_dry_breaks_a_loop_unless_a_breaker_stands_between() -> None:
    class Words:
        n_vocab = 6

        def token_bytes(self, id: int) -> bytes:
            return b"\n" if id == 5 else b"w%d" % id

        def encode(self, text: str, *, bos: bool | None = None) -> list[int]:
            raise AssertionError("a newline is one token")

    x = np.array([0, 0, 1, 0, 0, 0], np.float32)
    settings = Sampling(temperature=0, dry_multiplier=2)
    sampler = Sampler(settings, 6, tokenizer=Words())
    assert sampler.sample(x, [0, 1, 2, 0, 1]) != 2
    assert sampler.sample(x, [0, 1, 2, 0, 5, 1]) == 2


def test_dry_without_the_tokenizer_is_refused() -> None:
    with pytest.raises(SamplingError, match="tokenizer"):
        Sampler(Sampling(dry_multiplier=1), 10)


def test_logit_bias() -> None:
    x = some_logits()
    best = int(x.argmax())
    assert Sampler(Sampling(temperature=0, logit_bias={7: 1000}), 300).sample(x, []) == 7
    assert Sampler(Sampling(temperature=0, logit_bias={best: -np.inf}), 300).sample(x, []) != best
    with pytest.raises(SamplingError, match="300"):
        Sampler(Sampling(logit_bias={300: 1.0}), 300)


def test_ignore_eos() -> None:
    x = np.array([0, 5, 4, 3], np.float32)
    assert Sampler(Sampling(temperature=0, ignore_eos=True), 4, eog={1, 2}).sample(x, []) == 3
    assert Sampler(Sampling(temperature=0), 4, eog={1, 2}).sample(x, []) == 1


# --- custom samplers


def test_a_custom_sampler_sees_a_copy_of_all_logits_and_the_ids() -> None:
    seen = []

    def backwards(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        seen.append((logits.shape, str(logits.dtype), list(ids)))
        logits *= -1  # in place: the caller's array must not change
        return logits

    x = some_logits()
    before = x.copy()
    x.flags.writeable = False
    assert Sampler(Sampling(temperature=0, custom=backwards), 300).sample(x, [4, 2]) == x.argmin()
    np.testing.assert_array_equal(x, before)
    assert seen == [((300,), "float32", [4, 2])]


def test_several_custom_samplers_run_in_turn() -> None:
    def forbid_best(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        logits[logits.argmax()] = -np.inf
        return logits.astype(np.float64)

    x = some_logits()
    settings = Sampling(temperature=0, custom=[forbid_best] * 3)
    assert Sampler(settings, 300).sample(x, []) == np.argsort(-x)[3]


def test_a_custom_sampler_within_the_chain_cannot_bring_tokens_back() -> None:
    def upside_down(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        assert (logits > -np.inf).sum() == 5
        return np.where(logits > -np.inf, -logits, np.float32(100))

    x = some_logits()
    settings = Sampling(
        samplers="top_k;custom;min_p;temperature", custom=upside_down, top_k=5, temperature=0
    )
    sampler = Sampler(settings, 300)
    assert sampler.chain == ("top_k", "custom", "greedy")
    assert sampler.sample(x, []) == np.argsort(-x)[4]


def broken(kind: str) -> Any:
    def a_broken_one(logits: np.ndarray, ids: list[int]) -> object:
        return {
            "short": logits[:-1],
            "matrix": logits[None],
            "nothing": None,
            "words": np.array(["a"] * len(logits)),
            "complex": logits.astype(complex),
            "nan": np.where(logits == logits.max(), np.nan, logits),
            "inf": np.where(logits == logits.max(), np.inf, logits),
            "out": np.full_like(logits, -np.inf),
            "huge": logits.astype(np.float64) * 1e300,
        }[kind]

    return a_broken_one


@pytest.mark.parametrize("samplers", ["temperature", "top_k;custom;temperature"])
@pytest.mark.parametrize(
    "kind", ["short", "matrix", "nothing", "words", "complex", "nan", "inf", "out", "huge"]
)
def test_a_broken_custom_sampler_is_named(kind: str, samplers: str) -> None:
    sampler = Sampler(Sampling(custom=broken(kind), samplers=samplers), 300)
    with pytest.raises(SamplingError, match="a_broken_one"):
        sampler.sample(some_logits(), [])


def test_an_error_within_a_custom_sampler_stays_itself() -> None:
    def fails(logits: np.ndarray, ids: list[int]) -> np.ndarray:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Sampler(Sampling(custom=fails), 300).sample(some_logits(), [])


# --- grammars


class OnlyEven:
    """Masks in place or by what it returns, and counts what was accepted."""

    def __init__(self, *, returns: bool) -> None:
        self.returns = returns
        self.accepted: list[int] = []

    def mask(self, logits: np.ndarray) -> np.ndarray | None:
        if self.returns:
            return np.where(np.arange(len(logits)) % 2 == 0, logits, -np.inf)
        logits[1::2] = -np.inf
        return None

    def accept(self, id: int) -> bool:
        self.accepted.append(id)
        return True


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("t", [0.0, 5.0])
def test_a_constraint_holds_whatever_the_samplers_want(returns: bool, t: float) -> None:
    constraint = OnlyEven(returns=returns)
    settings = Sampling(
        seed=1,
        temperature=t,
        custom=lambda x, ids: -x,
        logit_bias={1: 1e6},
        **EVERYTHING,
    )
    x = some_logits()
    sampler = Sampler(settings, 300, constraint=constraint)
    got = [sampler.sample(x, [1]) for _ in range(50)]
    assert all(token % 2 == 0 for token in got)
    assert constraint.accepted == got
    assert x.argmax() == some_logits().argmax()


class Deaf:
    """It is never told what was chosen."""

    accept = None

    def mask(self, logits: Any) -> None: ...


@pytest.mark.parametrize("wrong", [3, "a+", False, OnlyEven, Deaf()])
def test_what_is_no_constraint_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(SamplingError, match="expected an object with mask and accept, found"):
        Sampler(Sampling(), 300, constraint=wrong)


def test_a_constraint_that_allows_nothing_is_an_error() -> None:
    class Nothing(OnlyEven):
        def mask(self, logits: np.ndarray) -> None:
            logits[:] = -np.inf

    with pytest.raises(SamplingError, match="grammar"):
        Sampler(Sampling(), 300, constraint=Nothing(returns=False)).sample(some_logits(), [])


@pytest.mark.slow
def test_few_tokens_left_by_a_mask_go_through_the_whole_chain() -> None:
    x = np.full(262_144, -np.inf, np.float32)
    x[[5, 70_000, 200_000]] = [1, 2, 3]
    for order in ("", "top_k", "top_p", "typ_p", "top_n_sigma", "xtc", "temperature"):
        settings = Sampling(
            samplers=order,
            seed=1,
            top_p=0.999,
            typical_p=0.999,
            top_n_sigma=5,
            xtc_probability=0.5,
        )
        sampler = Sampler(settings, len(x))
        assert {sampler.sample(x, []) for _ in range(200)} == {5, 70_000, 200_000}


# --- what is refused


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x[:-1], "expected 300"),
        (lambda x: x[None], "expected 300"),
        (lambda x: x.astype(complex), "complex"),
        (lambda x: np.where(np.arange(300) == 17, np.nan, x), "NaN at token 17"),
        (lambda x: np.where(np.arange(300) == 17, np.inf, x), "inf at token 17"),
        (lambda x: np.full(300, -np.inf), "every token"),
    ],
)
@pytest.mark.parametrize("t", [0, 0.8])
def test_logits_that_are_none(spoil: Any, words: str, t: float) -> None:
    expected = SamplingError if words in ("expected 300", "complex") else NotFiniteError
    with pytest.raises(expected, match=words):
        Sampler(Sampling(temperature=t), 300).sample(spoil(some_logits()), [])


def test_penalties_may_rule_out_every_token() -> None:
    settings = Sampling(frequency_penalty=3e38, samplers="penalties")
    with pytest.raises(SamplingError, match="ruled out"):
        Sampler(settings, 2).sample(np.zeros(2, np.float32), [0, 1] * 30)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 2, 5, 300, 5000]),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.floats(-1, 100),
            "dynatemp_range": st.floats(0, 2),
            "top_k": st.integers(-1, 400),
            "top_p": st.floats(0, 1),
            "min_p": st.floats(0, 1),
            "typical_p": st.floats(0, 1),
            "top_n_sigma": st.floats(-1, 4),
            "min_keep": st.integers(0, 8),
            "xtc_probability": st.floats(0, 1),
            "xtc_threshold": st.floats(0, 1),
            "repeat_penalty": st.floats(0.1, 10),
            "frequency_penalty": st.floats(-5, 5),
            "presence_penalty": st.floats(-5, 5),
            "dry_multiplier": st.floats(0, 5),
            "dry_base": st.floats(0, 5),
            "dry_allowed_length": st.integers(0, 5),
            "mirostat": st.integers(0, 2),
            "mirostat_tau": st.floats(0, 20),
            "mirostat_eta": st.floats(0, 10),
            "adaptive_target": st.floats(-1, 1),
            "adaptive_decay": st.floats(0, 0.99),
            "samplers": st.permutations([*DEFAULT_ORDER, "adaptive_p", "custom"]),
        },
    ),
)
def test_any_settings_give_a_token_that_was_not_ruled_out(
    seed: int, n: int, knobs: dict[str, Any]
) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(0, rng.choice([0, 1, 30, 1000]), n)).astype(np.float32)
    x[rng.random(n) < 0.3] = -np.inf
    x[rng.integers(n)] = 0
    settings = Sampling(
        seed=seed, dry_sequence_breakers=(), custom=lambda x, ids: x * np.float32(0.5), **knobs
    )
    sampler = Sampler(settings, n)
    ids = rng.integers(0, min(n, 4), 30).tolist()
    for _ in range(3):
        ids.append(sampler.sample(x, ids))
        assert x[ids[-1]] > -np.inf


def test_a_grammar_whose_text_is_whole() -> None:
    class Whole:
        accepting = True

        def mask(self, logits: np.ndarray) -> None:
            logits[:] = -np.inf

        def accept(self, id: int) -> None:
            raise AssertionError(id)

    sampler = Sampler(Sampling(), 4, constraint=Whole())
    assert not sampler.ended
    with pytest.raises(SamplingError, match="the grammar's mask: every token is ruled out"):
        sampler.sample(np.zeros(4, np.float32), [])
    assert sampler.ended
    Whole.accepting = False
    with pytest.raises(SamplingError):
        sampler.sample(np.zeros(4, np.float32), [])
    assert not sampler.ended
