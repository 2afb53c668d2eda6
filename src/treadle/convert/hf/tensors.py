"""Maps the tensors of a Hugging Face checkpoint to GGUF's, checked by name, shape and type."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.mlx_names import MLX_NAMES
from treadle.convert.hf.row_order import Layout, layout_of
from treadle.convert.hf.tensor_names import (
    ADAPTED,
    HEADS,
    MTP_TENSOR,
    NAME,
    NOT_STATES,
    NOT_TEXT,
    NOT_WEIGHTS,
    OLDER_KINDS,
    Names,
    checkpoint_name,
)
from treadle.convert.quantized.dequantized_tensor import DequantizedTensor
from treadle.convert.quantized.mlx import BLOCKS, PackedModule, find_packed, unpack, unpack_floats
from treadle.convert.sources.derived_tensors import (
    EXPERT,
    FACTOR,
    elements,
    make_tensors,
    multiplied_out,
    name_in_layer,
)
from treadle.errors import FileError, UnsupportedError
from treadle.formats import FORMATS, by_name
from treadle.formats.format import NO_GGML
from treadle.models.archs import ARCHS, row_of
from treadle.models.ffns import FFNS
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.decoder import MODEL_ROWS
from treadle.models.keys import ENC, N_DECODER_LAYER, ArchMetadata
from treadle.models.mixers import MIXERS
from treadle.models.pooling_head import DENSE
from treadle.models.structure import layer_of, needed_tensors

if TYPE_CHECKING:
    from treadle.convert.hf.config import HfConfig
    from treadle.files.gguf import GGUF
    from treadle.files.safetensors import SafeTensor, SafeTensors

CONVOLUTIONS = ("attn_conv_base", "ffn_conv_base")  # of DFlash 2
# Matrices that GGUF always has in F32.
SMALL = {
    *(f"{stem}.weight" for stem in ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv", "ssm_norm")),
    *(f"ssm_conv1d_{name}.weight" for name in "qkv"),
    *(f"shortconv_{name}.weight" for name in ("k", "v", "attn", "mlp")),
    "attn_rel_proj.weight",
    *(f"ffn_{one}_exps.bias" for one in ("gate", "up", "down")),
    *(
        f"time_mix_{one}.weight"
        for one in ("lerp_fused", *(f"{x}{i}" for x in "wavg" for i in (1, 2)))
    ),
    *(f"{at}_fn.weight" for at in ("hc_attn", "hc_ffn", "output_hc")),
    *(f"{at}_compressor_ape.weight" for at in ("attn", "indexer")),
    "ssm_a",
    "ssm_d",
    *CONVOLUTIONS,
}
BARE = ("ssm_a", "ssm_d", "ffn_down_exps.scale", *CONVOLUTIONS)  # names without ".weight"
GGML_TYPE = {"F32": 0, "F16": 1, "BF16": 30, "F64": 28}  # by the dtypes of weights
_BLOCKS = ("Q4_0", "Q4_1", "Q8_0", "MXFP4", "NVFP4")  # targets of packed weights
_TYPES = GGML_TYPE | {"I32": 26} | {name: by_name(name).ggml_id for name in _BLOCKS}

_SUBLAYERS = (*MIXERS.all_constants(), *FFNS.all_constants())
_WIDTHS = {  # name of the row length, by tensor
    row.name: row.shape[-1] for row in (*MODEL_ROWS, *(row for s in _SUBLAYERS for row in s.rows))
}
SCORING = ("cls.",)  # head that scores pairs; in no plan
EMBEDDINGS = "token_embd.weight"
OUTPUT = "output.weight"
OUTPUT_BIAS = "output.bias"
_PIECE = 1 << 22  # bytes compared at a time


@dataclass(frozen=True)
class MappedTensor:
    """A checkpoint tensor under its GGUF name.

    packed: the three tensors of an MLX module; None for an ordinary tensor.
    shape: GGUF's. layout: reorders the checkpoint's rows to GGUF's; None: the order is equal.
    """

    name: str
    tensor: SafeTensor
    ggml_type: int
    shape: tuple[int, ...]
    packed: PackedModule | None = None
    layout: Layout | None = None

    @property
    def origin(self) -> str:
        """The file and the checkpoint's tensor name, for messages."""
        return f"{self.tensor.path}: {self.tensor.name}"

    def floats(self, shift: float = 0.0) -> npt.NDArray[np.float32]:
        """Return all values plus ``shift`` as f32 [n], in GGUF's order. Raises FileError if a value
        is not finite.

        This copies: use it only for norms and biases.
        """
        tensor = self.tensor
        fmt = FORMATS[self.ggml_type]
        values = fmt.dequantize_rows(tensor.data).reshape(-1)
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            offset = tensor.offset + at * fmt.dtype.itemsize
            raise tensor.error(f"element {at} is {values[at]}", "finite numbers", offset=offset)
        if self.layout is not None:
            values = self.layout(values.reshape(tensor.shape)).reshape(-1)
        return values + np.float32(shift)

    def rows(self) -> npt.NDArray[np.uint8]:
        """Return all values as stored, uint8 [n_bytes], in GGUF's order: a view of the file, or a
        copy if there is a layout.
        """
        if self.layout is None:
            return self.tensor.data
        return self.layout(elements(self.tensor)).reshape(-1).view(np.uint8)


def name_tensors(weights: SafeTensors, hyper: HfConfig) -> dict[str, MappedTensor]:
    """Return every tensor that the model may use, by GGUF name. ``check_named`` checks the set
    later.

    Raises FileError for an unknown or duplicate tensor, and for embeddings that are missing or of
    another shape; UnsupportedError for types that treadle does not run or convert.
    """
    found: dict[str, MappedTensor] = {}
    tensors = {n: t for n, t in weights.tensors.items() if not _is_skipped(t, hyper)}
    for name in [name for name in hyper.family.copies if name in tensors][1:]:
        del tensors[name]
    if (packing := hyper.packing) is not None:
        tensors = unpack(
            unpack_floats(tensors, packing), packing, partial(_unpack_mode, hyper=hyper)
        )
    if hyper.family.experts or hyper.rules:
        tensors = make_tensors(tensors, hyper.rules)
    packed: dict[str, PackedModule] = {}
    if packing is not None:
        # mlx-lm's Gemma folders have a separate output, maybe of more bits, although config.json
        # ties it to the embeddings; mlx-lm uses it.
        if any(n.endswith(tuple(f"{stem}.weight" for stem in HEADS)) for n in tensors):
            hyper = replace(hyper, tied=False)
        packed = find_packed(tensors, packing, lambda tensor: _width(tensor, hyper))
        for tensor in (t for p in packed.values() for t in p.arrays[1:]):
            del tensors[tensor.name]
    for tensor in tensors.values():
        name = _gguf_name(tensor, hyper)
        if name in found:
            raise tensor.error(f"maps to {name}, as {found[name].tensor.name} does")
        found[name] = named_as(name, tensor, hyper, packed.get(tensor.name))
    if OUTPUT_BIAS in found and hyper.tied:  # GGUF has it only with an output matrix
        found.setdefault(OUTPUT, replace(found[EMBEDDINGS], name=OUTPUT))
    if OUTPUT in found:  # transformers 5 ignores tying if it differs
        hyper = replace(hyper, tied=False)
    if hyper.family.drafts:
        return found
    _check(EMBEDDINGS, (hyper.sizes["n_vocab"], hyper.sizes["n_embd"]), weights, hyper, found)
    spare = hyper.tied or hyper.scores or hyper.lacks_output_head
    if not (spare or ARCHS[hyper.family.arch].graph == "encoder"):
        _check(OUTPUT, (hyper.sizes["n_vocab"], hyper.sizes["n_embd"]), weights, hyper, found)
    return found


def without_copy(found: Mapping[str, MappedTensor]) -> dict[str, MappedTensor]:
    """Return the tensors ``found`` without an output matrix that equals the embeddings, for a
    converter. Both are read up to the first difference.
    """
    kept = dict(found)
    output = kept.get(OUTPUT)
    embeddings = kept[EMBEDDINGS]
    if OUTPUT_BIAS in kept:
        return kept
    if output and not output.packed and _is_same(output.tensor, embeddings.tensor):
        del kept[OUTPUT]
    return kept


def _is_same(tensor: SafeTensor, other: SafeTensor) -> bool:
    """Return whether two tensors have equal shape, type and bytes."""
    if (tensor.shape, tensor.dtype) != (other.shape, other.dtype):
        return False
    starts = range(0, tensor.n_bytes, _PIECE)
    a = tensor.data
    b = other.data
    return all(np.array_equal(a[at : at + _PIECE], b[at : at + _PIECE]) for at in starts)


def named_as(
    name: str, tensor: SafeTensor, hyper: HfConfig, packed: PackedModule | None = None
) -> MappedTensor:
    """Return a tensor under GGUF's ``name``, with the layout that brings it into GGUF's order.
    Raises UnsupportedError for an unsupported type, or packed weights that need reordering.
    """
    linear = isinstance(tensor, DequantizedTensor)  # unpacked as [out, in] in every model
    layout, shape = layout_of(layer_of(name)[1], tensor.shape, hyper, linear=linear)
    if name.endswith(FACTOR):
        shape = (math.prod(shape),)
    if packed is not None:
        if layout is not None:
            what = "packed weights that would need reordering: not supported"
            raise UnsupportedError(f"{tensor.path}: {tensor.name}: {what}")
        return MappedTensor(name, tensor, NO_GGML, packed.shape, packed)
    tensor = multiplied_out(tensor) if layout is not None else tensor
    if tensor.dtype not in _TYPES:
        raise UnsupportedError(
            f"{tensor.path}: {tensor.name}: weights in {tensor.dtype}: "
            f"treadle supports {', '.join(GGML_TYPE)} from safetensors"
        )
    return MappedTensor(name, tensor, _TYPES[tensor.dtype], shape, None, layout)


def mtp_tensors(weights: SafeTensors, hyper: HfConfig) -> dict[str, SafeTensor]:
    """Return the tensors of MTP layers, by checkpoint name. ``convert/hf/mtp.py`` maps them to
    GGUF.
    """
    return {
        name: tensor
        for name, tensor in weights.tensors.items()
        if _is_mtp(name, hyper) and not NOT_WEIGHTS.fullmatch(name)
    }


def count_other_parts(weights: SafeTensors, hyper: HfConfig) -> int:
    """Return the number of tensors of a multimodal model's parts for images and sound, which are
    left out.
    """
    return sum(bool(NOT_TEXT.fullmatch(name)) for name in weights.tensors) if hyper.nested else 0


def tasks_left_out(weights: SafeTensors) -> str:
    """Return a note for the user on task adapters inside the model, "" if there are none."""
    if not any(ADAPTED.fullmatch(name) for name in weights.tensors):
        return ""
    return (
        "the adapters inside, one per task, are left out: embeddings are for no task unless an "
        "adapter is given (FOLDER/TASK)"
    )


def check_named(
    weights: SafeTensors, hyper: HfConfig, found: Mapping[str, MappedTensor], model: GGUF
) -> dict[str, MappedTensor]:
    """Return ``found`` in GGUF's order of tensors, checked against the tensors that the graph
    names.

    ``model`` has the metadata, and the tensors in the shapes of ``found``. Raises FileError for a
    tensor that is missing, unknown or of another shape, and for invalid keys.
    """
    arch = row_of(hyper.family.arch, model.metadata)
    graph = GRAPHS[arch.graph]
    try:
        config = graph.read(ArchMetadata(model, arch.name, arch.keys), arch)
    except FileError as error:
        key = (error.where or "").removeprefix(f"{arch.name}.")
        if key not in hyper.config_names:
            raise
        where = f"{hyper.config_names[key]} ({error.where})"
        expected = error.expected
        raise FileError(error.what, path=hyper.path, where=where, expected=expected) from None
    order: dict[str, tuple[int, ...]] = {}
    for i, (row, name, shape) in enumerate(needed_tensors(graph, config, found)):
        _check(name, shape, weights, hyper, found, f" ({', '.join(row.shape)})")
        order[name] = layer_of(name)[0], i
    for name, named in found.items():
        if name.startswith(SCORING) or name in DENSE:  # applied after the last states
            order[name] = -1, len(order)
        elif name.endswith(FACTOR) and (at := order.get(name.removesuffix(FACTOR) + ".weight")):
            order[name] = *at, 1
        elif graph.unread(config, name):  # kept: llama.cpp may need it
            order[name] = layer_of(name)[0], len(order)
        if name not in order:
            raise named.tensor.error(f"is not a tensor of {_model(hyper)}")
    ordered = sorted(found.items(), key=lambda item: order[item[0]])
    return dict(renamed(name, named, arch.names) for name, named in ordered)


def renamed(
    name: str, named: MappedTensor, names: Iterable[tuple[str, str]]
) -> tuple[str, MappedTensor]:
    """Return a tensor's name and the tensor with that name: the one in GGUF files if ``names``,
    pairs of (name in files, name in the graph), has a row for it; else unchanged.
    """
    for theirs, ours in names:
        if theirs.endswith(".") and name.startswith(ours):
            name = theirs + name.removeprefix(ours)
        if layer_of(name)[1] == ours:
            name = name.removesuffix(ours) + theirs
    return name, replace(named, name=name)


def _is_skipped(tensor: SafeTensor, hyper: HfConfig) -> bool:
    """Return whether to skip the tensor: it is no weight of the text model, belongs to an MTP
    layer, or is empty (transformers writes matrices without rows for 0 shared experts).
    """
    name = tensor.name
    if NOT_WEIGHTS.fullmatch(name) or (hyper.nested and NOT_TEXT.fullmatch(name)):
        return True
    if 0 in tensor.shape or _is_mtp(name, hyper):
        return True
    if ARCHS[hyper.family.arch].graph != "encoder" or not NOT_STATES.fullmatch(name):
        return False
    match = NAME.fullmatch(name)
    return not (match and match["stem"] in _names(hyper))


def _is_mtp(name: str, hyper: HfConfig) -> bool:
    match = MTP_TENSOR.match(name)
    if match is None:
        return False
    return not match["layer"] or 0 <= int(match["layer"]) - hyper.n_layer < hyper.n_extra


def _gguf_name(tensor: SafeTensor, hyper: HfConfig) -> str:
    """Return GGUF's name of the tensor. Raises FileError if the family's table has none."""
    match = NAME.fullmatch(tensor.name)
    names = _names(hyper)
    layer = match["layer"] if match else None
    # An encoder with a decoder has names with the side; an encoder alone has them without.
    side = match["side"] if match and ARCHS[hyper.family.arch].encoder else None
    stem = names.get(f"{side}.{match['stem']}" if side else match["stem"]) if match else None
    if match is None or stem is None or (layer is not None and int(layer) >= _n_layers(hyper)):
        close = difflib.get_close_matches(match["stem"] if match else tensor.name, names, 1, 0.7)
        hint = f" (the closest is {close[0]})" if close and stem is None else ""
        raise tensor.error(f"is not a tensor of {_model(hyper)}{hint}")
    kind = OLDER_KINDS.get(match["kind"], match["kind"])
    row = stem if stem in BARE else f"{stem}.{kind}"
    blk = f"{ENC}blk" if side == "encoder" else "blk"
    return row if layer is None else f"{blk}.{layer}.{row}"


def _n_layers(hyper: HfConfig) -> int:
    """Return the number of layers; for an encoder with a decoder, the larger of the two numbers."""
    n_decoder: int = hyper.metadata.get(f"{hyper.family.arch}.{N_DECODER_LAYER}", 0)
    return max(hyper.n_layer, n_decoder)


def _names(hyper: HfConfig) -> Names:
    """Return GGUF's names by checkpoint name, both without layer and suffix: those of the family's
    table, of its scoring head, and of mlx-lm.
    """
    scores = hyper.family.score_names if hyper.scores else {}
    own = {**hyper.family.names, **scores}
    return own | {name: stem for name, stem in MLX_NAMES.items() if name not in own}


def _unpack_mode(name: str, hyper: HfConfig) -> str:
    """Return how to unpack the MLX module whose weight is ``name``: "F32" for tensors that GGUF has
    in F32; BLOCKS for those that a derivation rule or the stacking of experts moves; "" to leave it
    packed.
    """
    rest = name_in_layer(name)
    if EXPERT.fullmatch(name) or any(rest in rule.of for rule in hyper.rules):
        return BLOCKS
    match = NAME.fullmatch(name)
    stem = match and _names(hyper).get(match["stem"])
    return "F32" if f"{stem}.weight" in SMALL else ""


def _model(hyper: HfConfig) -> str:
    return f"a {hyper.family.arch} model with {hyper.n_layer} layers"


def _width(tensor: SafeTensor, hyper: HfConfig) -> int | None:
    """Return the row length of a matrix by config.json, in weights; None if it gives none."""
    return hyper.sizes.get(_WIDTHS.get(layer_of(_gguf_name(tensor, hyper))[1], ""))


def _check(
    name: str,
    shape: tuple[int, ...],
    weights: SafeTensors,
    hyper: HfConfig,
    found: Mapping[str, MappedTensor],
    words: str = "",
) -> None:
    """Raise FileError unless ``found`` has the tensor ``name`` in this shape. The message names the
    checkpoint's tensor; ``words`` is added to it, after "config.json".
    """
    if name not in found:
        where = _hf_name(name, hyper, found)
        expected = f"shape {list(shape)}"
        raise FileError("the tensor is missing", path=weights.path, where=where, expected=expected)
    if found[name].shape != shape:
        said = f"{list(shape)} by config.json{words}"
        raise found[name].tensor.error(f"shape {list(found[name].shape)}", said)


def _hf_name(name: str, hyper: HfConfig, found: Mapping[str, MappedTensor]) -> str:
    """Return the checkpoint's name of GGUF's tensor ``name``, for messages, with the prefixes that
    the tensors ``found`` have in the checkpoint.
    """
    layer, rest = layer_of(name)
    stem, _, kind = rest.rpartition(".")
    names = [hf for hf, gguf in _names(hyper).items() if gguf == stem]
    if ARCHS[hyper.family.arch].encoder and layer >= 0:  # each side has names of its own
        side = "encoder." if name.startswith(ENC) else "decoder."
        own = next((hf.removeprefix(side) for hf in names if hf.startswith(side)), stem)
        return f"{side}block.{layer}.{own}.{kind}"
    if not names:
        return name
    # Of several, take that of a sublayer that exists here: attention, or a recurrent one.
    here = [n.tensor.name for n in found.values() if layer_of(n.name)[0] == layer]
    parts = {hf: f".{hf.rpartition('.')[0]}." for hf in names}
    own = next((hf for hf in names if any(parts[hf] in each for each in here)), names[0])
    others = (n for n in found.values() if n.name != OUTPUT)
    likes = (n.tensor.name for n in others if layer < 0 or layer_of(n.name)[0] >= 0)
    sibling = next(likes, "model.")
    return checkpoint_name(f"{own}.{kind}", sibling, layer)
