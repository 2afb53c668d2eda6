"""The layer that predicts the token after the next (MTP, DeepSeek-AI, 2024), as a model of its own.

::

    x = eh_proj([norm(embed(ids)), norm(states)])     states: the model's, of the tokens before
    x = layer(x)
    logits = linear(norm(x))

A file has it behind the model's own layers, ``blk.N`` with ``nextn.*`` tensors. What it lacks of an
embedding, a last norm and a head is the model's.
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

OWN = {  # in place of the model's, where the layer has them
    "embed_tokens": "token_embd",
    "shared_head_norm": "output_norm",
    "shared_head_head": "output",
}
GIVEN = "nextn.states"  # the second half of each row; the first is written here


def build(g: Ops) -> Rows:
    """The states behind the layer."""
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
    """Whether a file has such a layer, of an architecture whose layer is known."""
    return bool(
        config.arch.nextn
        and gguf.metadata.get(f"{config.arch.name}.{N_NEXTN}")
        and any(name.startswith(f"blk.{config.n_layer}.nextn.") for name in gguf.tensors)
    )


def nextn_model(gguf: GGUF, config: Config, i: int = 0) -> tuple[GGUF, Config]:
    """Such a layer of a file, the ``i``-th, as a file and its config. The file shares the maps of
    ``gguf``, which is to be closed in its place.

    Raises FileError where a tensor is missing or has another shape.
    """
    stem, own = f"blk.{config.n_layer + i}.", dict[str, str]()
    for theirs, name in OWN.items():
        own[f"{stem}nextn.{theirs}.weight"] = f"{name}.weight"
    made = copy.copy(gguf)
    made.tensors = {name: at for name, at in gguf.tensors.items() if not name.startswith("blk.")}
    made.tensors.setdefault("output.weight", gguf.tensors["token_embd.weight"])
    for name, tensor in gguf.tensors.items():
        if name in own:
            made.tensors[own[name]] = tensor
        elif name.startswith(f"{stem}nextn."):
            made.tensors[name.removeprefix(stem)] = tensor
        elif name.startswith(stem):
            made.tensors[f"blk.0.{name.removeprefix(stem)}"] = tensor
    # It attends as the model's last layer that does, and has the same FFN.
    like = next(layer for layer in reversed(config.layers) if layer.n_head_kv)
    alone = replace(
        config,
        arch=replace(config.arch, graph="nextn"),
        layers=(replace(like, kv_from=0),),
    )
    optional, ignored = check_tensors(made, NEXTN, alone)
    factors, ignored = find_factors(made, alone, ignored)
    return made, replace(alone, optional=optional, factors=factors, ignored=ignored)
