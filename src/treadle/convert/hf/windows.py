"""Which layers of a family see a window only, or have attention at all."""

from __future__ import annotations

from collections.abc import Callable

from treadle.convert.hf.family import Windowed
from treadle.files.keys import MetadataReader
from treadle.models.graphs.positions import NOPE_PERIOD, by_period
from treadle.models.graphs.recurrence import INTERVAL

ATTENTION = ("full_attention", "attention")  # words for layers with keys and values
_EVERY = 4  # Qwen's layers with keys and values, where config.json lists none


def every_layer(keys: MetadataReader, n_layer: int) -> Windowed:
    """Mistral."""
    return [True] * n_layer


def upper_layers(keys: MetadataReader, n_layer: int) -> Windowed:
    """Qwen 2 and 3: those from ``max_window_layers`` on, if the window is in use at all."""
    if not keys.flag("use_sliding_window", False):
        return None
    first = keys.integer("max_window_layers", lo=0)
    return [i >= first for i in range(n_layer)]


def every_layer_if_used(keys: MetadataReader, n_layer: int) -> Windowed:
    """Qwen 3 with experts: transformers does not read ``max_window_layers`` there."""
    return [True] * n_layer if keys.flag("use_sliding_window", False) else None


def every_other_lower(keys: MetadataReader, n_layer: int) -> Windowed:
    """Qwen 2 with experts: every other layer of those before ``max_window_layers``."""
    if not keys.flag("use_sliding_window", False):
        return None
    end = keys.integer("max_window_layers", lo=0)
    return [i % 2 == 0 and i < end for i in range(n_layer)]


def all_but_every(usual: int, *, told: bool = False) -> Callable[[MetadataReader, int], Windowed]:
    """All layers but every ``usual``-th; ``told``: or as ``sliding_window_pattern`` says, which
    transformers reads in some families only.
    """

    def windowed(keys: MetadataReader, n_layer: int) -> Windowed:
        period = usual
        if told and isinstance(keys.get("sliding_window_pattern"), int):
            period = keys.integer("sliding_window_pattern", lo=0)
        return [period > 0 and (i + 1) % period != 0 for i in range(n_layer)]

    return windowed


def still_layers(keys: MetadataReader, n_layer: int) -> Windowed:
    """SmolLM 3: those without a rope, if the window is in use. Layers that are listed have it in
    any case.
    """
    used = keys.flag("use_sliding_window", False)
    return [used and not turns for turns in by_period(NOPE_PERIOD, n_layer)]


def has_attention(keys: MetadataReader, n_layer: int) -> list[bool]:
    """Which layers have keys and values in place of a state."""
    kinds = keys.get("layer_types")
    if kinds is None:
        every = keys.integer(INTERVAL, _EVERY)
        return [(i + 1) % every == 0 for i in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    return [kind in ATTENTION for kind in kinds]
