"""A layer for multi-token prediction (MTP, DeepSeek-AI, 2024) as a model of its own, which drafts.

::

    x = eh_proj([norm(embed(ids)), norm(states)])     states: the target's, of the previous tokens
    x = layer(x)
    logits = linear(norm(x))

In a file it follows the target's own layers, as ``blk.N`` with ``nextn.*`` tensors. If it has no
embedding, last norm or head, it uses the target's. Models with several streams of states may have
an MTP layer on all of them (``graphs/streams/nextn.py``).
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.models.graphs.decoder import DECODER, halves_of
from treadle.models.keys import NEXTN as N_NEXTN
from treadle.models.layer import build_layer
from treadle.models.structure import TensorRow, check_tensors, find_factors

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.ops import Ops, Rows

STREAM_PARTS = ("fn", "base", "scale")  # tensors of which a token's weights of streams are made
HEAD = "nextn.hc_head_"  # of the mix of streams behind the layer
OUTPUT_MIX = "output_hc_"  # the model's, and the layer's in a file of MTP layers alone
SHARED = "token_embd.weight", "output_norm.weight", "output.weight"  # of such a file
OWN = {  # the layer's own tensors -> the model's that they replace
    "embed_tokens": "token_embd",
    "shared_head_norm": "output_norm",
    "shared_head_head": "output",
    **{f"hc_head_{part}": f"{OUTPUT_MIX}{part}" for part in STREAM_PARTS},
}
GIVEN = "nextn.states"  # the second half of each row; ``build`` writes the first


def build(g: Ops) -> Rows:
    """Build the MTP layer; return the hidden states after it. Its inputs are the token ids and
    GIVEN, f32 ``[N, 2 * n_embd]``: the second half of each row has the target's hidden states, the
    first is overwritten with the embedding.
    """
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


NEXTN_ROWS = (
    TensorRow("nextn.eh_proj.weight", ("n_embd", "twice_n_embd")),
    TensorRow("nextn.enorm.weight", ("n_embd",)),
    TensorRow("nextn.hnorm.weight", ("n_embd",)),
)
NEXTN = replace(
    DECODER,
    build=build,
    rows=(*DECODER.rows, *NEXTN_ROWS),
    sizes=lambda config: {**DECODER.sizes(config), "twice_n_embd": 2 * config.n_embd},
)


def has_nextn(gguf: GGUF, config: Config) -> bool:
    """Return whether a file has an MTP layer of a kind that is supported."""
    return bool(
        config.arch.nextn
        and gguf.metadata.get(f"{config.arch.name}.{N_NEXTN}")
        and any(name.startswith(f"blk.{config.n_layer}.nextn.") for name in gguf.tensors)
    )


def is_nextn_alone(gguf: GGUF, arch: Arch) -> bool:
    """Return whether a file has MTP layers but not the target's layers, as llama.cpp's converter
    writes with ``--mtp``.
    """
    n_layer = _layers_before(gguf, arch.name)
    return (
        n_layer > 0
        and f"blk.{n_layer}.nextn.eh_proj.weight" in gguf.tensors
        and not any(name.startswith("blk.0.") for name in gguf.tensors)
    )


def _layers_before(gguf: GGUF, arch: str) -> int:
    """Return the number of layers before the MTP layers, by the file's keys of the architecture
    ``arch``; 0 if these count no MTP layers.
    """
    n = gguf.metadata.get(f"{arch}.{N_NEXTN}")
    n_block = gguf.metadata.get(f"{arch}.block_count")
    if not isinstance(n, int) or not isinstance(n_block, int) or not 0 < n < n_block:
        return 0
    return n_block - n


def with_target_tensors(draft: GGUF, model: GGUF, config: Config) -> GGUF:
    """Return ``draft``, a file with MTP layers only, with the target's embeddings, last norm and
    head where it has none. ``model`` and ``config``: the target's file and config. The result
    shares the mappings of both files.

    Raises UnsupportedError if the two files differ in architecture or in the number of layers
    before the MTP layers.
    """
    arch = config.arch.name
    found = draft.metadata.get("general.architecture")
    n_layer = _layers_before(draft, str(found))
    if found != arch or n_layer != config.n_layer:
        raise UnsupportedError(
            f"{draft.path}: cannot draft for {model.path}: it has the MTP layers of {found} with "
            f"{n_layer} layers, the model is {arch} with {config.n_layer}"
        )
    result = copy.copy(draft)
    lent = {name: at for name, at in model.tensors.items() if not name.startswith("blk.")}
    result.tensors = {**lent, **draft.tensors}
    return result


def nextn_model(gguf: GGUF, config: Config, i: int = 0) -> tuple[GGUF, Config]:
    """Return the file's ``i``-th MTP layer, from 0, as a model: a GGUF with its tensors, and its
    config. ``config``: the target's. The result shares the mappings of ``gguf``: close ``gguf``,
    not the result.

    Raises FileError if a tensor is missing or has a wrong shape.
    """
    stem = f"blk.{config.n_layer + i}."
    own = dict[str, str]()
    for theirs, name in OWN.items():
        own[f"{stem}nextn.{theirs}.weight"] = f"{name}.weight"
    result = copy.copy(gguf)
    result.tensors = {name: at for name, at in gguf.tensors.items() if not name.startswith("blk.")}
    embeddings = gguf.tensors.get("token_embd.weight")
    if embeddings is not None:
        result.tensors.setdefault("output.weight", embeddings)
    for name, tensor in gguf.tensors.items():
        if name in own:
            result.tensors[own[name]] = tensor
        elif name.startswith(f"{stem}nextn."):
            result.tensors[name.removeprefix(stem)] = tensor
        elif name.startswith(stem):
            result.tensors[f"blk.0.{name.removeprefix(stem)}"] = tensor
    from treadle.models.graphs import GRAPHS

    graph = "nextn_streams" if config.arch.nextn == "streams" else "nextn"
    alone = replace(
        config,
        arch=replace(config.arch, graph=graph),
        layers=(replace(GRAPHS[config.arch.graph].mtp_layer(config), kv_from=0),),
    )
    optional, ignored = check_tensors(result, GRAPHS[graph], alone)
    factors, ignored = find_factors(result, alone, ignored)
    return result, replace(alone, optional=optional, factors=factors, ignored=ignored)
