"""MTP layers under GGUF's names. They follow a model's last layer and predict further tokens.

Some families number them as ``model.layers.N``, with N from ``num_hidden_layers`` on, with a few
additional tensors. Qwen has one MTP layer in a separate part, ``mtp.``, where a layer's input and
output tensors are outside the layer. DeepSeek V4 numbers them from 0 as ``mtp.N``: each has the two
halves of ``eh_proj`` as two tensors, and its own tensors to mix the streams after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.convert.hf.tensor_names import NAME, Names
from treadle.convert.hf.tensors import MappedTensor, named_as
from treadle.convert.sources.derived_tensors import DerivationRule, Rows, make_tensors
from treadle.errors import UnsupportedError
from treadle.files.hf_drafters import MTP_NAME, stage_name
from treadle.models.archs import ARCHS
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.compressed import RATIOS
from treadle.models.graphs.limits import LIMIT, SHARED_LIMIT
from treadle.models.graphs.nextn import STREAM_PARTS, nextn_model
from treadle.models.graphs.recurrence import FLAGS
from treadle.models.keys import NEXTN, ArchMetadata

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig
    from treadle.files.gguf import GGUF
    from treadle.files.safetensors import SafeTensor

_PART = "mtp."
_SURPLUS = "is not a tensor of an MTP layer"
_COUNTED: Names = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.head": "nextn.shared_head_head",
    "shared_head.norm": "nextn.shared_head_norm",
    "final_layernorm": "nextn.shared_head_norm",  # Hunyuan 3's
}
_OF_STREAMS: Names = {
    **_COUNTED,
    "norm": "nextn.shared_head_norm",
    **{f"hc_out.{part}": f"nextn.hc_head_{part}" for part in STREAM_PARTS},
}
_APART: Names = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}


def name_mtp(tensors: Mapping[str, SafeTensor], hyper: HfConfig) -> dict[str, MappedTensor]:
    """Return the MTP layers' ``tensors`` under GGUF's names, ordered by layer.

    Raises UnsupportedError for an unsupported architecture or layout, FileError for an unknown
    tensor.
    """
    if not ARCHS[hyper.family.arch].nextn:
        raise UnsupportedError(f"treadle does not support them in {hyper.family.arch}")
    if any(stage_name(name) == "main_proj.weight" for name in tensors):
        what = "its drafter is DSpark, which the same folder names with --draft (draft=...)"
        raise UnsupportedError(f"{what}; convert writes it with --mtp")
    found: dict[str, MappedTensor] = {}
    own = {each.name: each for each in (_renumber(t, hyper) for t in tensors.values())}
    for tensor in make_tensors(own, (*hyper.rules, _JOINED)).values():
        layer, name = _gguf_name(tensor, hyper)
        name = f"blk.{layer}.{name}"
        if name in found:
            raise tensor.error(f"maps to {name}, as {found[name].tensor.name} does")
        found[name] = named_as(name, tensor, hyper)
    return dict(sorted(found.items(), key=lambda item: int(item[0].split(".")[1])))


def _renumber(tensor: SafeTensor, hyper: HfConfig) -> SafeTensor:
    """Return a tensor ``mtp.N.*`` renamed to ``layers.{n_layer + N}.*``, other tensors
    unchanged.
    """
    match = MTP_NAME.fullmatch(tensor.name)
    if match is None:
        return tensor
    return replace(tensor, name=f"layers.{hyper.n_layer + int(match['layer'])}.{match['rest']}")


def _join_columns(left: Rows, right: Rows) -> Rows:
    """Return the two matrices side by side, joined along columns."""
    return np.concatenate([left, right], axis=1)


_JOINED = DerivationRule(("e_proj.weight", "h_proj.weight"), {"eh_proj.weight": _join_columns})


def _gguf_name(tensor: SafeTensor, hyper: HfConfig) -> tuple[int, str]:
    """Return the layer's number, and GGUF's name of the tensor within the layer."""
    apart = tensor.name.startswith(_PART)
    match = NAME.fullmatch(tensor.name.removeprefix(_PART))
    layer = int(match["layer"] or 0) if match else 0
    if apart and layer:
        raise UnsupportedError(
            f"{tensor.path}: {tensor.name}: treadle supports one layer in {_PART}*"
        )
    counted = _OF_STREAMS if ARCHS[hyper.family.arch].nextn == "streams" else _COUNTED
    names: Names = {**hyper.family.names, **({} if apart else counted)}
    if match and match["layer"] is None:
        names = _APART
    if match is None or match["stem"] not in names:
        raise tensor.error(_SURPLUS)
    return hyper.n_layer if apart else layer, f"{names[match['stem']]}.{match['kind']}"


# Keys with a number for each layer, and those of MTP layers; None: the last layer's.
_LISTS = {
    FLAGS: False,
    "attention.head_count_kv": 1,
    RATIOS: 0,
    LIMIT: None,
    SHARED_LIMIT: None,
}


def mtp_keys(tensors: Mapping[str, MappedTensor], hyper: HfConfig) -> dict[str, Any]:
    """Return the GGUF keys that change if the MTP layers ``tensors`` are added: the numbers of
    layers, and lists with a value per layer.
    """
    n = max(int(name.split(".")[1]) for name in tensors) + 1 - hyper.n_layer
    made: dict[str, Any] = {"block_count": hyper.n_layer + n, NEXTN: n}
    prefix = f"{hyper.family.arch}."
    for key, more in _LISTS.items():
        of_layers = hyper.metadata.get(prefix + key)
        if isinstance(of_layers, list) and of_layers:
            made[key] = [*of_layers, *[of_layers[-1] if more is None else more] * n]
    return {prefix + key: value for key, value in made.items()}


def check_mtp(model: GGUF, hyper: HfConfig) -> None:
    """Check the MTP layers of ``model``, which needs keys and shapes only, against the tensors that
    the MTP graph uses.

    Raises FileError for a tensor that is missing, unknown, or of another shape.
    """
    arch = ARCHS[hyper.family.arch]
    keys = ArchMetadata(model, arch.name, arch.keys)
    config = GRAPHS[arch.graph].read(keys, arch)
    for i in range(keys.integer(NEXTN)):
        _, alone = nextn_model(model, config, i)
        for name in alone.ignored:
            at = name.replace("blk.0.", f"blk.{config.n_layer + i}.")
            if at != name and not GRAPHS[alone.arch.graph].unread(alone, name):
                raise model.tensors[at].error(_SURPLUS)
