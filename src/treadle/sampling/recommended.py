"""The sampling that the makers of a model recommend, as its files hold it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from treadle.errors import SamplingError
from treadle.sampling.settings import Sampling

# Keys behind "general.sampling.", by the field that each one is.
KEYS = {
    "temperature": "temp",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "penalty_repeat",
    **{name: name for name in ("top_k", "top_p", "min_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("mirostat", "mirostat_tau", "mirostat_eta")},
}
# Names in Hugging Face's generation_config.json that are not the fields'.
_THEIRS = {"repeat_penalty": "repetition_penalty"}


def read_generation(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a generation_config.json recommends, as ``general.sampling.*``; nothing where it wants
    the likeliest token. A value that is out of range is left out.
    """
    if said.get("do_sample") is False:
        return {}
    found = _within_range({name: said.get(_THEIRS.get(name, name)) for name in KEYS})
    return {f"general.sampling.{KEYS[name]}": value for name, value in found.items()}


def recommended(metadata: Mapping[str, Any]) -> Sampling:
    """What a GGUF's ``metadata`` recommends (``general.sampling.*``); for the rest llama.cpp's
    values. A value that is out of range is left out: no file may make every answer an error.
    """
    said = {name: metadata.get(f"general.sampling.{key}") for name, key in KEYS.items()}
    return Sampling(**_within_range(said))


def _within_range(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers such as `Sampling` takes."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, int | float):
            with suppress(SamplingError):
                given: dict[str, Any] = {name: value}
                found[name] = getattr(Sampling(**given), name)
    return found
