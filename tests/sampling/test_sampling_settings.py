"""Sampling: defaults, ranges, names."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from treadle.errors import SamplingError, TreadleError
from treadle.sampling import DEFAULT_ORDER, Sampling


def test_defaults_are_llama_cpps() -> None:
    # common/common.h, struct common_params_sampling (September 2026)
    assert dataclasses.asdict(Sampling()) == {
        "seed": None,
        "samplers": DEFAULT_ORDER,
        "temperature": 0.8,
        "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 1.0,
        "top_n_sigma": -1.0,
        "min_keep": 0,
        "xtc_probability": 0.0,
        "xtc_threshold": 0.1,
        "repeat_last_n": 64,
        "repeat_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": 64,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
        "mirostat": 0,
        "mirostat_tau": 5.0,
        "mirostat_eta": 0.1,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "logit_bias": {},
        "ignore_eos": False,
        "custom": (),
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_p", -0.1),
        ("min_p", 2),
        ("typical_p", -1),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1),
        ("frequency_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("repeat_last_n", -2),
        ("dry_multiplier", -1),
        ("dry_base", math.inf),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", ["", "x"]),
        ("dry_sequence_breakers", "\n"),
        ("dry_sequence_breakers", [3]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("mirostat", 3),
        ("mirostat_tau", -1),
        ("mirostat_eta", -1),
        ("adaptive_target", 1.1),
        ("adaptive_decay", 1.0),
        ("dynatemp_range", -0.1),
        ("dynatemp_exponent", -1),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_keep", -1),
        ("seed", -2),
        ("seed", 2**64),
        ("seed", "x"),
        ("samplers", ["top_q"]),
        ("samplers", [4]),
        ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {-3: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", [(3, 1.0)]),
        ("custom", 3),
        ("custom", [3]),
    ],
)
def test_out_of_range_is_a_sampling_error_that_names_the_setting(name: str, value: object) -> None:
    words = {"dry_sequence_breakers": "breaker", "samplers": "sampler"}
    with pytest.raises(SamplingError, match=words.get(name, name)) as caught:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, TreadleError)
    assert isinstance(caught.value, ValueError)


def test_samplers_by_any_of_llama_cpps_names() -> None:
    assert Sampling(samplers="top-k; nucleus;typ;Typical;temp;adaptive-p").samplers == (
        *("top_k", "top_p", "typ_p", "typ_p", "temperature", "adaptive_p"),
    )
    assert Sampling(samplers=[]).samplers == ()
    assert Sampling(samplers="").samplers == ()


def test_minus_one_is_no_seed_as_in_llama_cpp() -> None:
    assert Sampling(seed=-1).seed is None
    assert Sampling(seed=np.int64(5)).seed == 5  # type: ignore[arg-type]


def test_replace_checks_again() -> None:
    settings = Sampling(custom=lambda logits, ids: logits)
    assert dataclasses.replace(settings, temperature=0).greedy
    with pytest.raises(SamplingError):
        dataclasses.replace(settings, top_p=7)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 2},
        {"seed": -2},
        {"samplers": ["banana"]},
        {"dry_sequence_breakers": [""]},
        {"dry_sequence_breakers": ["\ud83d"]},
        {"logit_bias": {-1: 0}},
        {"custom": [5]},
    ],
)
def test_errors_have_the_setting(settings: dict[str, Any]) -> None:
    with pytest.raises(SamplingError) as caught:
        Sampling(**settings)
    assert [caught.value.setting] == list(settings)


def test_samplers_by_llama_cpps_letters() -> None:
    whole = (*DEFAULT_ORDER, "infill", "adaptive_p")
    assert Sampling(samplers="edskypmxtia").samplers == whole
    assert Sampling(samplers="kt").samplers == ("top_k", "temperature")
    assert Sampling(samplers="temp").samplers == ("temperature",)  # a name before letters
    with pytest.raises(SamplingError, match="no sampler 'kq'"):
        Sampling(samplers="kq")
