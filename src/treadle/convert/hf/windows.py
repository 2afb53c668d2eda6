"""Per-layer patterns of families: which layers have a sliding window, and which have attention.

Functions that return ``Windowed`` are for ``Family.windowed``. ``keys`` reads config.json's text
part.
"""

from __future__ import annotations

from collections.abc import Callable

from treadle.convert.hf.family import Windowed
from treadle.files.metadata import MetadataReader
from treadle.models.graphs.positions import NOPE_PERIOD, by_period
from treadle.models.graphs.recurrence import INTERVAL

ATTENTION = ("full_attention", "attention")  # names of layers with a KV cache
_EVERY = 4  # Qwen's default: every fourth layer has attention


def every_layer(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all (Mistral)."""
    return [True] * n_layer


def upper_layers(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: those from ``max_window_layers`` on (Qwen 2
    and 3). None if ``use_sliding_window`` is false.
    """
    if not keys.flag("use_sliding_window", False):
        return None
    first = keys.integer("max_window_layers", lo=0)
    return [i >= first for i in range(n_layer)]


def every_layer_if_used(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all (Qwen 3 MoE), because transformers
    ignores ``max_window_layers`` there. None if ``use_sliding_window`` is false.
    """
    return [True] * n_layer if keys.flag("use_sliding_window", False) else None


def every_other_lower(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: every other layer below
    ``max_window_layers`` (Qwen 2 MoE). None if ``use_sliding_window`` is false.
    """
    if not keys.flag("use_sliding_window", False):
        return None
    end = keys.integer("max_window_layers", lo=0)
    return [i % 2 == 0 and i < end for i in range(n_layer)]


def all_but_every(
    usual: int, *, overridable: bool = False
) -> Callable[[MetadataReader, int], Windowed]:
    """Return a function for ``Family.windowed``: all layers but every ``usual``-th have the window.

    ``overridable``: the key ``sliding_window_pattern``, which transformers reads only in some
    families, overrides ``usual``; 0 means no layer.
    """

    def windowed(keys: MetadataReader, n_layer: int) -> Windowed:
        period = usual
        if overridable and isinstance(keys.get("sliding_window_pattern"), int):
            period = keys.integer("sliding_window_pattern", lo=0)
        return [period > 0 and (i + 1) % period != 0 for i in range(n_layer)]

    return windowed


def all_but_first_of_four(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: all but the first of each four."""
    return by_period(-4, n_layer)


def window_nope_layers(keys: MetadataReader, n_layer: int) -> Windowed:
    """Return the layers with a window, bool [n_layer]: those without RoPE (SmolLM 3); none if
    ``use_sliding_window`` is false. A ``layer_types`` list overrides this in any case.
    """
    used = keys.flag("use_sliding_window", False)
    return [used and not turns for turns in by_period(NOPE_PERIOD, n_layer)]


def has_attention(keys: MetadataReader, n_layer: int) -> list[bool]:
    """Return a flag per layer: true for attention with a KV cache, false for a recurrent state.
    Raises FileError if ``layer_types`` is no list of ``n_layer`` kinds.
    """
    kinds = keys.get("layer_types")
    if kinds is None:
        every = keys.integer(INTERVAL, _EVERY)
        return [(i + 1) % every == 0 for i in range(n_layer)]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        keys.fail("layer_types", f"is {kinds!r:.60}", f"a list of {n_layer}")
    return [kind in ATTENTION for kind in kinds]
