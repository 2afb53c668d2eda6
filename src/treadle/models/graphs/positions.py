"""How far each layer sees, and by which rope it tells where a token stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from treadle.models.archs import PATTERN, ROPE_PATTERN, WINDOW, Arch
from treadle.models.graphs.experts import has_experts
from treadle.models.keys import N_LAYER_MAX, ArchMetadata
from treadle.models.rope import Rope, read_ropes

NOPE_PERIOD = 4  # layers, of which the last does not turn, in archs with ``nope="fourth"``


def read_windows(keys: ArchMetadata, n_layer: int, n_block: int) -> tuple[int, tuple[bool, ...]]:
    """The window, and which layers have it: the key of the pattern is a period, of which the last
    sees everything (the first, if it is negative), or one flag per layer, perhaps of those too that
    predict further tokens. Without that key no layer has one, as in llama.cpp: Qwen2 files carry a
    window that the model does not use.
    """
    flags = keys.get(PATTERN)
    # Of a pattern without a window nothing says how far those layers see.
    window = keys.integer(WINDOW, 0 if flags is None else None, lo=0, hi=1 << 31)
    if not window or flags is None:
        return 0, (False,) * n_layer
    if isinstance(flags, Sequence) and not isinstance(flags, (str, bytes)):
        n_flags = n_block if len(flags) == n_block else n_layer
        return window, keys.flags(PATTERN, n_flags, False)[:n_layer]
    period = keys.integer(PATTERN, lo=-N_LAYER_MAX, hi=N_LAYER_MAX)
    return window, tuple(by_period(period, n_layer))


def by_period(period: int, n_layer: int) -> list[bool]:
    """Which layers have the window where the last of each period sees everything, or the first if
    the period is negative; all of them if it is 0.
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
    """The tables of the rope, and which of them each layer has. Layers with a window have one of
    their own where there is a base for it. ``window`` is the file's, even where no layer has it.
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
    """The same, and a table of queries that grow with their position, where the file asks for it:
    the temperature of attention, as Ministral 3 has it.
    """
    temperature = keys.number("attention.temperature_scale", 0.0, lo=0.0)
    if not temperature:
        return ropes
    if len(ropes) != 1:
        keys.refuse(
            "attention.temperature_scale", "treadle supports it only with one RoPE for all layers"
        )
    return *ropes, replace(ropes[0], temperature=temperature)
