"""A layer for multi-token prediction (MTP, DeepSeek-AI, 2024) as a model of its own.

::

    x = eh_proj([norm(embed(ids)), norm(states)])     states: the model's, of the previous tokens
    x = layer(x)
    logits = linear(norm(x))

In a file it follows the model's own layers, as ``blk.N`` with ``nextn.*`` tensors. It uses the
model's embedding, last norm and head if it has none of its own.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.models.graphs.decoder import DECODER, halves_of
from treadle.models.keys import NEXTN as N_NEXTN
from treadle.models.layer import build_layer
from treadle.models.structure import TensorRow, check_tensors, find_factors

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config
    from treadle.models.ops import Ops, Rows

OWN = {  # the layer's own tensors -> the model's that they replace
    "embed_tokens": "token_embd",
    "shared_head_norm": "output_norm",
    "shared_head_head": "output",
}
GIVEN = "nextn.states"  # the second half of each row; ``build`` writes the first


def build(g: Ops) -> Rows:
    """Build the layer; return its states."""
    n = g.config.n_embd
    x = g.call(
        "embedded_beside",
        "nextn",
        g.given(GIVEN, 2 * n),
        weight="token_embd",
        scale=g.config.embd_scale,
        norms=("nextn.enorm", "nextn.hnorm"),
    )
    x = g.linear("nextn.eh_proj", x, "nextn.eh_proj")
    return build_layer(g, 0, x, *halves_of(g.config.layers[0]))


NEXTN = replace(
    DECODER,
    build=build,
    rows=(
        *DECODER.rows,
        TensorRow("nextn.eh_proj.weight", ("n_embd", "twice_n_embd")),
        TensorRow("nextn.enorm.weight", ("n_embd",)),
        TensorRow("nextn.hnorm.weight", ("n_embd",)),
    ),
    sizes=lambda config: {**DECODER.sizes(config), "twice_n_embd": 2 * config.n_embd},
)


def has_nextn(gguf: GGUF, config: Config) -> bool:
    """Return whether a file has an MTP layer, and its architecture's are supported."""
    return bool(
        config.arch.nextn
        and gguf.metadata.get(f"{config.arch.name}.{N_NEXTN}")
        and any(name.startswith(f"blk.{config.n_layer}.nextn.") for name in gguf.tensors)
    )


def nextn_model(gguf: GGUF, config: Config, i: int = 0) -> tuple[GGUF, Config]:
    """Return the file's ``i``-th MTP layer as a GGUF and its config. It shares the mappings of
    ``gguf``: close that one, not this.

    Raises FileError if a tensor is missing or has a wrong shape.
    """
    stem = f"blk.{config.n_layer + i}."
    own = dict[str, str]()
    for theirs, name in OWN.items():
        own[f"{stem}nextn.{theirs}.weight"] = f"{name}.weight"
    result = copy.copy(gguf)
    result.tensors = {name: at for name, at in gguf.tensors.items() if not name.startswith("blk.")}
    result.tensors.setdefault("output.weight", gguf.tensors["token_embd.weight"])
    for name, tensor in gguf.tensors.items():
        if name in own:
            result.tensors[own[name]] = tensor
        elif name.startswith(f"{stem}nextn."):
            result.tensors[name.removeprefix(stem)] = tensor
        elif name.startswith(stem):
            result.tensors[f"blk.0.{name.removeprefix(stem)}"] = tensor
    # Its attention and FFN are those of the model's last layer with attention.
    like = next(layer for layer in reversed(config.layers) if layer.n_head_kv)
    alone = replace(
        config,
        arch=replace(config.arch, graph="nextn"),
        layers=(replace(like, kv_from=0),),
    )
    optional, ignored = check_tensors(result, NEXTN, alone)
    factors, ignored = find_factors(result, alone, ignored)
    return result, replace(alone, optional=optional, factors=factors, ignored=ignored)
