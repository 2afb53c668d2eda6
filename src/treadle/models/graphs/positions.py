"""Keys of positions: the attention windows and rope tables of each layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.models.archs import PATTERN, ROPE_PATTERN, WINDOW, Arch
from treadle.models.graphs.experts import has_experts
from treadle.models.keys import N_LAYER_MAX, ArchMetadata
from treadle.models.rope import Rope
from treadle.models.rope_keys import read_ropes

NOPE_PERIOD = 4  # layers, of which the last has no rope, in archs with ``nope="fourth"``


def read_windows(keys: ArchMetadata, n_layer: int, n_block: int) -> tuple[int, tuple[bool, ...]]:
    """Return the window in tokens (0: none), and for each of ``n_layer`` layers whether it has the
    window.

    The file's pattern is a period (``by_period``) or one flag for each layer, either without or
    with the MTP layers at the end (``n_block`` in all). Without a pattern no layer has a window, as
    in llama.cpp: Qwen2 files have an unused window.
    """
    flags = keys.get(PATTERN)
    # A pattern without a window does not determine how far those layers attend.
    window = keys.integer(WINDOW, 0 if flags is None else None, lo=0, hi=1 << 31)
    if not window or flags is None:
        return 0, (False,) * n_layer
    if isinstance(flags, Sequence) and not isinstance(flags, (str, bytes)):
        n_flags = n_block if len(flags) == n_block else n_layer
        return window, keys.flags(PATTERN, n_flags, False)[:n_layer]
    period = keys.integer(PATTERN, lo=-N_LAYER_MAX, hi=N_LAYER_MAX)
    return window, tuple(by_period(period, n_layer))


def by_period(period: int, n_layer: int) -> list[bool]:
    """Return for each of ``n_layer`` layers whether it has the window: of each ``period`` layers
    all but the last; if ``period`` is negative, all but the first of each ``-period``; if it is 0,
    all.
    """
    if period < 0:
        return [i % -period > 0 for i in range(n_layer)]
    return [period == 0 or i % period < period - 1 for i in range(n_layer)]


def read_tables(
    keys: ArchMetadata,
    arch: Arch,
    window: int,
    local: Sequence[bool],
    head_dim: int,
    n_ctx_train: int,
) -> tuple[tuple[Rope, ...], tuple[int | None, ...]]:
    """Return the rope tables, and for each layer the index of its table, None for layers without
    rope. ``local``: whether each layer has a window; these layers have their own table if the file
    has a base for it. ``window``: the file's window in tokens, even if no layer uses it.
    """
    told = arch.nope == "told" and not keys.flag("rope.scaling.finetuned", True)
    if arch.rope == "none" or told:
        return (), (None,) * len(local)
    ropes = read_ropes(keys, head_dim, n_ctx_train)
    own = len(ropes) > 1 and any(local)
    tables: list[int | None] = [int(own and here) for here in local]
    turned = by_period(NOPE_PERIOD, len(local))
    flags = keys.flags(ROPE_PATTERN, len(local), True)
    for i, here in enumerate(local):
        if not flags[i]:
            tables[i] = None
        if arch.nope == "fourth" and not turned[i]:
            tables[i] = None
        wide = window and not here
        if wide and (arch.nope == "global" or (arch.nope == "sparse" and has_experts(keys, i))):
            tables[i] = None
    return ropes[: 1 + own], tuple(tables)


def read_temperature(keys: ArchMetadata, ropes: tuple[Rope, ...]) -> tuple[Rope, ...]:
    """Return ``ropes``, and after them a table for queries if the file has a temperature that grows
    with position (Ministral 3): a copy of the RoPE table that also multiplies queries by the
    temperature. Raises UnsupportedError if the file has a temperature and several tables.
    """
    temperature = keys.number("attention.temperature_scale", 0.0, lo=0.0)
    if not temperature:
        return ropes
    if len(ropes) != 1:
        keys.refuse(
            "attention.temperature_scale", "treadle supports it only with one RoPE for all layers"
        )
    return *ropes, replace(ropes[0], temperature=temperature)
