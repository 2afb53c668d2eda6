"""Which tensor of a Hugging Face checkpoint is which of GGUF, checked by name, shape and type."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from treadle.convert.mlx import Packed, find_packed
from treadle.errors import FileError, UnsupportedError
from treadle.formats import FORMATS
from treadle.formats.format import NO_GGML
from treadle.models.archs import ARCHS
from treadle.models.graphs.decoder import LAYER_ROWS, MODEL_ROWS
from treadle.record import dataclass

if TYPE_CHECKING:
    from treadle.convert.hf_config import Hyper
    from treadle.files.safetensors import SafeTensor, SafeTensors

# transformers' stems to GGUF's. With four norms a layer, the same words stand in other places.
_MODEL = {"embed_tokens": "token_embd", "norm": "output_norm"}
_HEAD = {"lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_LAYER_POST_NORM = {
    **_LAYER,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_POST_NORM = "post_ffw_norm.weight"  # what tells the two apart

# A model of text alone, the text part of a larger one (old layout, new layout), or a bare decoder.
_PREFIX = re.compile(
    r"(?:language_model\.model\.|model\.language_model\.|language_model\.|model\.)?"
)
_NAME = re.compile(
    _PREFIX.pattern
    + r"(?:layers\.(?P<layer>0|[1-9]\d{0,5})\.)?(?P<stem>[a-z_.]+)\.(?P<kind>weight|bias)"
)
_NOT_WEIGHTS = re.compile(r".*\.rotary_emb\.inv_freq")  # what the configuration says anyway
_NOT_TEXT = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector|vision_model)\..*")

GGML_TYPE = {"F32": 0, "F16": 1, "BF16": 30, "F64": 28}  # of the dtypes that hold weights

_ROWS = {row.name: (i, row) for i, row in enumerate((*MODEL_ROWS, *LAYER_ROWS))}


@dataclass(frozen=True)
class Named:
    """A tensor of the checkpoint under its GGUF name; ``packed``: with others, in MLX's format."""

    name: str
    tensor: SafeTensor
    ggml_type: int
    packed: Packed | None = None

    @property
    def origin(self) -> str:
        """Where it is, for messages."""
        return f"{self.tensor.path}: {self.tensor.name}"

    def floats(self, shift: float = 0.0) -> npt.NDArray[np.float32]:
        """All of it as float32, flat; FileError when not every value is finite.

        A copy: for norms and biases only.
        """
        tensor, fmt = self.tensor, FORMATS[self.ggml_type]
        values = fmt.dequantize_rows(tensor.data)
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            offset = tensor.offset + at * fmt.dtype.itemsize
            raise tensor.error(f"element {at} is {values[at]}", "finite numbers", offset=offset)
        return values + np.float32(shift)


def name_tensors(weights: SafeTensors, hyper: Hyper) -> dict[str, Named]:
    """Every tensor that the model uses, by GGUF name, in GGUF's order.

    Raises FileError for a tensor that is missing, surplus, there twice or of another shape, and
    UnsupportedError for one that is not in floating point of 16 bits or more.
    """
    found: dict[str, Named] = {}
    tensors = {n: t for n, t in weights.tensors.items() if not _is_other(n, hyper)}
    packed: dict[str, Packed] = {}
    if (packing := hyper.packing) is not None:
        # Gemma's of mlx-lm have an output of their own, maybe of more bits, beside a config.json
        # that ties it to the embeddings; mlx-lm uses it.
        if any(n.endswith(tuple(f"{stem}.weight" for stem in _HEAD)) for n in tensors):
            hyper = replace(hyper, tied=False)
        packed = find_packed(tensors, packing, lambda tensor: _width(tensor, hyper))
        for tensor in (t for p in packed.values() for t in p.arrays[1:]):
            del tensors[tensor.name]
    for tensor in tensors.values():
        name = _gguf_name(tensor, hyper)
        if name is None:
            continue
        if name in found:
            raise tensor.error(f"is a second {name}, beside {found[name].tensor.name}")
        if tensor.name in packed:
            _check_shape(tensor, packed[tensor.name].shape, name, hyper)
            found[name] = Named(name, tensor, NO_GGML, packed[tensor.name])
            continue
        _check_shape(tensor, tensor.shape, name, hyper)
        if tensor.dtype not in GGML_TYPE:
            raise UnsupportedError(
                f"{tensor.path}: {tensor.name}: weights in {tensor.dtype}: "
                f"treadle reads {', '.join(GGML_TYPE)} from safetensors"
            )
        found[name] = Named(name, tensor, GGML_TYPE[tensor.dtype])
    _check_complete(weights, hyper, found)
    return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def layer_of(name: str) -> tuple[int, str]:
    """``blk.3.ffn_up.weight`` is (3, "ffn_up.weight"); outside layers, the layer is -1."""
    if not name.startswith("blk."):
        return -1, name
    _, i, rest = name.split(".", 2)
    return int(i), rest


def _place(name: str) -> tuple[int, int]:
    layer, rest = layer_of(name)
    return layer, _ROWS[rest][0]


def _layer_names(hyper: Hyper) -> dict[str, str]:
    needs = ARCHS[hyper.family.arch].needs
    return _LAYER_POST_NORM if _POST_NORM in needs else _LAYER


def _is_other(name: str, hyper: Hyper) -> bool:
    """Whether the tensor is no weight of the decoder."""
    if _NOT_WEIGHTS.fullmatch(name):
        return True
    return bool(hyper.family.nested and _NOT_TEXT.fullmatch(name))


def _gguf_name(tensor: SafeTensor, hyper: Hyper) -> str | None:
    """The name in GGUF; None for a tensor that the decoder is not to have."""
    match = _NAME.fullmatch(tensor.name)
    stem = layer = None
    if match and match["layer"] is None:
        stem = {**_MODEL, **_HEAD}.get(match["stem"])
    elif match and int(match["layer"]) < hyper.n_layer:
        stem, layer = _layer_names(hyper).get(match["stem"]), match["layer"]
    row = f"{stem}.{match['kind']}" if match else ""
    if stem is None or row not in _ROWS:
        known = [*_MODEL, *_HEAD, *_layer_names(hyper)]
        close = difflib.get_close_matches(match["stem"] if match else tensor.name, known, 1, 0.7)
        hint = f" (the closest is {close[0]})" if close and stem is None else ""
        raise tensor.error(
            f"is no tensor of a {hyper.family.arch} model with {hyper.n_layer} layers{hint}"
        )
    if stem in _HEAD.values() and hyper.tied:
        return None  # transformers puts the embeddings in its place, whatever it holds
    return row if layer is None else f"blk.{layer}.{row}"


def _width(tensor: SafeTensor, hyper: Hyper) -> int | None:
    """Weights in a row, as config.json has it."""
    name = _gguf_name(tensor, hyper)
    return hyper.sizes[_ROWS[layer_of(name)[1]][1].shape[-1]] if name else None


def _check_shape(tensor: SafeTensor, shape: tuple[int, ...], name: str, hyper: Hyper) -> None:
    row = _ROWS[layer_of(name)[1]][1]
    expected = tuple(hyper.sizes[word] for word in row.shape)
    if shape != expected:
        said = f"{list(expected)} by config.json ({', '.join(row.shape)})"
        raise tensor.error(f"shape {list(shape)}", said)


def _check_complete(weights: SafeTensors, hyper: Hyper, found: dict[str, Named]) -> None:
    """Every tensor that must be there is; one that some layers have, all have."""
    needs = ARCHS[hyper.family.arch].needs
    in_layers = {rest for layer, rest in map(layer_of, found) if layer >= 0}
    wanted = [row.name for row in MODEL_ROWS if not row.optional]
    wanted += [] if hyper.tied else [f"{stem}.weight" for stem in _HEAD.values()]
    for i in range(hyper.n_layer):
        wanted += [
            f"blk.{i}.{row.name}"
            for row in LAYER_ROWS
            if not row.optional or row.name in needs or row.name in in_layers
        ]
    for name in wanted:
        if name not in found:
            row = _ROWS[layer_of(name)[1]][1]
            shape = [hyper.sizes[word] for word in row.shape]
            raise FileError(
                "the tensor is missing",
                path=weights.path,
                where=_hf_name(name, hyper, found),
                expected=f"shape {shape}",
            )


def _hf_name(name: str, hyper: Hyper, found: dict[str, Named]) -> str:
    """The name that transformers gives to what GGUF calls ``name``, as this checkpoint spells."""
    layer, rest = layer_of(name)
    stem, _, kind = rest.rpartition(".")
    names = {**_MODEL, **_HEAD} if layer < 0 else _layer_names(hyper)
    own = next(hf for hf, gguf in names.items() if gguf == stem)
    if own in _HEAD:
        return f"{own}.{kind}"
    others = (named.tensor.name for known, named in found.items() if known != "output.weight")
    match = _PREFIX.match(next(others, "model."))
    between = "" if layer < 0 else f"layers.{layer}."
    return f"{match[0] if match else ''}{between}{own}.{kind}"
