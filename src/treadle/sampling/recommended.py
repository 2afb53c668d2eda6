"""Sampling settings that a model's files recommend."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from treadle.errors import SamplingError
from treadle.sampling.settings import Sampling

# Keys after "general.sampling.", by field.
KEYS = {
    "temperature": "temp",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "penalty_repeat",
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
}
# Names in Hugging Face's generation_config.json that differ from the fields'.
_HF_NAMES = {"repeat_penalty": "repetition_penalty"}


def read_generation_config(said: Mapping[str, Any]) -> dict[str, Any]:
    """Convert ``said``, the contents of a generation_config.json, to GGUF's keys
    ``general.sampling.*`` for the settings it recommends; empty if it sets ``do_sample`` to false.
    Values out of range are dropped.
    """
    if said.get("do_sample") is False:
        return {}
    found = _within_range({name: said.get(_HF_NAMES.get(name, name)) for name in KEYS})
    return {f"general.sampling.{KEYS[name]}": value for name, value in found.items()}


def recommended(metadata: Mapping[str, Any]) -> Sampling:
    """Return the settings in a GGUF's ``metadata`` (``general.sampling.*``), and llama.cpp's values
    for the rest. Values out of range are dropped, so that a file cannot make every answer fail.
    """
    said = {name: metadata.get(f"general.sampling.{key}") for name, key in KEYS.items()}
    return Sampling(**_within_range(said))


def _within_range(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values, by field of `Sampling`, that are numbers and that it accepts."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, int | float):
            with suppress(SamplingError):
                given: dict[str, Any] = {name: value}
                found[name] = getattr(Sampling(**given), name)
    return found
