"""Granite Switch: a decoder with adapters within it, which control tokens of the text choose.

The host handles the control tokens (``models/switch.py``): the decoder reads their substitutes, and
plans for texts with adapters have further steps (``plan/lowering/lora.py``). The graph itself is a
decoder's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.archs import LORA_A, LORA_B
from treadle.models.config import Switch
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, halves_of
from treadle.models.mixers import MIXERS
from treadle.models.mixers.names import FUSED
from treadle.models.structure import Sublayer, TensorRow, built_by_graph

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata

N_ADAPTERS = "adapters.count"
RANK = "adapters.lora_rank"
TOKENS = "adapters.token_ids_activate"
SUBSTITUTES = "adapters.token_ids_substitute"
GAIN = "adapters.router_gain"
LATEST = "adapters.latest"  # the last control token chooses; not in llama.cpp's files
MOST = 4096  # adapters, and ranks, as in llama.cpp
MOST_GAIN = 1e4
_WIDTHS = {  # of each matrix: its rows and columns
    "attn_q": ("n_q", "n_embd"),
    "attn_k": ("n_k", "n_embd"),
    "attn_v": ("n_v", "n_embd"),
    "attn_output": ("n_embd", "n_attn"),
    "ffn_gate": ("n_ff", "n_embd"),
    "ffn_up": ("n_ff", "n_embd"),
    "ffn_down": ("n_embd", "n_ff"),
}


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return a decoder's config, with the adapters and control tokens in ``Config.switch``. Raises
    UnsupportedError for layers with experts, FileError for invalid lists of control tokens.
    """
    config = reading.read(keys, arch)
    for i, layer in enumerate(config.layers):
        if layer.ffn != "gated":
            keys.refuse("expert_count", f"layer {i} is {layer.ffn}: treadle supports dense layers")
    layers = tuple(replace(layer, mixer=FUSED) for layer in config.layers)
    return replace(config, layers=layers, switch=_read_switch(keys, config.n_vocab))


def _read_switch(keys: ArchMetadata, n_vocab: int) -> Switch:
    n = keys.integer(N_ADAPTERS, lo=1, hi=MOST)
    latest = keys.flag(LATEST, False)
    found = {key: keys.integers(key, 0, n_vocab - 1) for key in (TOKENS, SUBSTITUTES)}
    counts = (n, n + 1) if latest else (n,)  # with a token of the model without an adapter
    for key, tokens in found.items():
        if len(tokens) not in counts or len(tokens) != len(found[TOKENS]):
            expected = f"{' or '.join(map(str, counts))}, by {keys.prefix}{N_ADAPTERS}"
            keys.fail(key, f"has {len(tokens)} entries", expected)
    tokens = found[TOKENS]
    if twice := [token for i, token in enumerate(tokens) if token in tokens[:i]]:
        keys.fail(TOKENS, f"has token {twice[0]} twice", "a token of its own for each adapter")
    return Switch(
        n=n,
        rank=keys.integer(RANK, lo=1, hi=MOST),
        tokens=tuple(tokens),
        substitutes=tuple(found[SUBSTITUTES]),
        gain=keys.number(GAIN, 15.0, lo=0.0, hi=MOST_GAIN),
        latest=latest,
    )


ADAPTERS = built_by_graph(
    "adapters",
    rows=tuple(
        row
        for name, (rows, columns) in _WIDTHS.items()
        for row in (
            TensorRow(f"{name}{LORA_A}", ("n_slots", "n_rank", columns)),
            TensorRow(f"{name}{LORA_B}", ("n_slots", rows, "n_rank")),
        )
    ),
    sizes=lambda layer: {**MIXERS[FUSED].sizes(layer), "n_ff": layer.n_ff},
)


def parts_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN, and the tensors of the adapters."""
    return *halves_of(layer), ADAPTERS


def _sizes(config: Config) -> dict[str, int]:
    assert config.switch is not None
    own = {"n_slots": config.switch.n + 1, "n_rank": config.switch.rank}
    return {**DECODER.sizes(config), **own}


# No "stream": later stages would need the tokens.
SWITCHED_GRAPH = replace(
    DECODER,
    outputs=UNSTAGED_OUTPUTS,
    sizes=_sizes,
    sublayers=parts_of,
    read=read,
    parts=lambda: (*DECODER.parts(), ADAPTERS),
)
