"""Keys and tensors of a projector file, by modality: GGUF files of architecture ``clip``."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.tensor import Bytes, MadeTensor, Tensor
from treadle.models.towers.bounds import bounded_stem

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

CLIP = "clip"  # general.architecture
VISION = "vision"
AUDIO = "audio"
_ENCODERS = {VISION: "has_vision_encoder", AUDIO: "has_audio_encoder"}
_PREFIXES = {VISION: "v.", AUDIO: "a."}
ROUNDED = "bf16"  # activations of decoders' products with BF16 matrices
EXACT = "f32"  # activations of towers' products
SAMPLE = 64  # bytes of each tensor, at start, middle and end, in ``identity``
N_LAYER_MAX = 1024
CONVOLUTIONS = ("conv1d.", "conv2d.")  # their biases have axes of length 1

# llama.cpp's names of tensors in layers, and those of the layers in ``models``.
_IN_LAYERS = {
    "ln1": "attn_norm",
    "ln2": "ffn_norm",
    "attn_out": "attn_output",
    "attn_post_norm": "post_attention_norm",
    "ffn_post_norm": "post_ffw_norm",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias|(?:in|out)put_(?:min|max))")


@dataclass(frozen=True, eq=False)
class ClipConfig:
    """One modality's part of a projector file.

    gguf: a view of the file whose tensors have no prefix ``v.`` or ``a.``; tensors of layers are
        named as in ``models``, and convolutions are matrices ``[n_out, n_in * window]``.
    keys: the keys of the modality, without ``clip.vision.`` or ``clip.audio.``.
    activation: activation of the layers, from the file's flags; its name in
        ``kernels/activations.py``. Files of some types have no flag.
    image_size: pixels of a side of the square that the tower was trained on.
    patch_size: pixels of a patch' side.
    n_out: width of the media rows, the decoder's ``n_embd``; 0 in files that do not state it.
    mean, std: one for each colour; pixels are normalised to ``(pixels / 255 - mean) / std``.
    min_pixels, max_pixels: bounds of the resized picture's area in pixels; 0 in files without them.
    identity: digest of the file's keys, and of the shapes and some bytes of its tensors.
    read: names of the tensors that the host has read with ``floats``.
    """

    gguf: GGUF
    keys: MetadataReader
    projector_type: str
    modality: str
    activation: str
    n_embd: int
    n_ff: int
    n_layer: int
    n_head: int
    norm_eps: float
    n_out: int
    image_size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_pixels: int
    max_pixels: int
    identity: bytes = field(repr=False)
    read: set[str] = field(default_factory=set, repr=False)

    def has(self, name: str) -> bool:
        """Return whether the part has a tensor of this name."""
        return name in self.gguf.tensors

    @property
    def n_bounded(self) -> int:
        """Number of matrices whose inputs or results the file clamps."""
        tensors = self.gguf.tensors.items()
        bounds = [(stem, tensor) for name, tensor in tensors if (stem := bounded_stem(name))]
        return len({stem for stem, tensor in bounds if np.isfinite(tensor.dequantize()).any()})

    def floats(self, name: str) -> np.ndarray:
        """Return a tensor's weights, f32, and note it in ``read``. Raises FileError if it is
        missing.
        """
        self.read.add(name)
        return self.tensor(name).dequantize()

    def tensor(self, name: str) -> Tensor:
        """Return the part's tensor ``name``. Raises FileError if it is missing."""
        if name not in self.gguf.tensors:
            raise FileError("the tensor is missing", path=self.gguf.path, where=name)
        return self.gguf.tensors[name]

    def reordered(self, orders: Mapping[str, np.ndarray]) -> ClipConfig:
        """Return a copy in which some tensors have their rows, or a vector's elements, in another
        order. ``orders``: by tensor name, the index of the old row for each new one. The weights
        are reordered in memory when a plan reads them.
        """
        view = copy.copy(self.gguf)
        view.tensors = dict(view.tensors)
        for name, order in orders.items():
            of = view.tensors[name]
            make = partial(_moved, of, order)
            head = of.name, of.shape, of.ggml_type, of.format, of.n_bytes
            view.tensors[name] = MadeTensor(*head, of.path, of.offset, of.file, make)
        return replace(self, gguf=view)

    def replaced(self, tensors: Mapping[str, np.ndarray]) -> ClipConfig:
        """Return a copy with these f32 weights, by name, in place of tensors of the same names, or
        in addition.
        """
        from treadle.formats import by_name

        like = next(iter(self.gguf.tensors.values()))
        made = {}
        for name, values in tensors.items():
            data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
            source = self.gguf.tensors.get(name, like)
            made[name] = source.in_memory(name, values.shape, by_name("F32"), data)
        return self.with_tensors(made)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> ClipConfig:
        """Return a copy with these tensors in place of those of the same names, or in addition."""
        view = copy.copy(self.gguf)
        view.tensors = {**view.tensors, **tensors}
        return replace(self, gguf=view)


def read_clip(
    gguf: GGUF, names: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, ClipConfig]:
    """Return the file's parts by modality, "vision" and "audio". ``names``: by projector type,
    further names of tensors in layers: those of the graph by those of the file.

    Raises UnsupportedError for a file that is no projector, FileError for damaged keys.
    """
    found = gguf.metadata.get("general.architecture")
    if found != CLIP:
        what = f"general.architecture is {found!r:.60}"
        raise UnsupportedError(f"{gguf.path}: {what}: not a projector file (expected {CLIP!r})")
    common = MetadataReader(_below(gguf, "clip."), gguf.path, prefix="clip.")
    parts = {}
    identity = _identity(gguf)
    for modality, flag in _ENCODERS.items():
        if common.flag(flag, False):
            parts[modality] = _read_part(gguf, common, modality, identity, names or {})
    if not parts:
        what = "has neither a picture nor a sound encoder"
        raise FileError(what, path=gguf.path, where="clip.has_vision_encoder")
    return parts


def _below(gguf: GGUF, prefix: str) -> dict[str, Any]:
    found = gguf.metadata.items()
    return {key.removeprefix(prefix): value for key, value in found if key.startswith(prefix)}


def _read_part(
    gguf: GGUF,
    common: MetadataReader,
    modality: str,
    identity: bytes,
    names: Mapping[str, Mapping[str, str]],
) -> ClipConfig:
    prefix = f"clip.{modality}."
    keys = MetadataReader(_below(gguf, prefix), gguf.path, None, prefix, "the key is missing")
    # Files of 2023 with LLaVA's projector lack the key.
    default = "mlp" if common.flag("has_llava_projector", False) else None
    both = common.get("projector_type")
    kind = keys.text("projector_type", both if isinstance(both, str) else default)
    n_layer = keys.integer("block_count", 0, lo=0, hi=N_LAYER_MAX)
    activation = "gelu_quick"
    if common.flag("use_silu", False):
        activation = "silu"
    elif common.flag("use_gelu", False):
        activation = "gelu"
    return ClipConfig(
        gguf=_view(gguf, _PREFIXES[modality], {**_IN_LAYERS, **names.get(kind, {})}),
        keys=keys,
        projector_type=kind,
        modality=modality,
        activation=activation,
        n_embd=keys.integer("embedding_length"),
        n_ff=keys.integer("feed_forward_length", 0, lo=0),
        n_layer=n_layer,
        n_head=keys.integer("attention.head_count", 0, lo=1 if n_layer else 0),
        norm_eps=keys.number("attention.layer_norm_epsilon", 1e-6, lo=0.0, hi=1.0),
        n_out=keys.integer("projection_dim", 0, lo=0),
        image_size=keys.integer("image_size", 0, lo=0),
        patch_size=keys.integer("patch_size", 0, lo=1 if modality == VISION else 0),
        mean=_triple(keys, "image_mean", 0.0, -10.0),
        std=_triple(keys, "image_std", 1.0, 1e-6),
        min_pixels=keys.integer("image_min_pixels", 0, lo=0, hi=1 << 40),
        max_pixels=keys.integer("image_max_pixels", 0, lo=0, hi=1 << 40),
        identity=identity,
    )


def _triple(keys: MetadataReader, key: str, default: float, least: float) -> tuple[float, ...]:
    """Return the three numbers, one for each colour, under ``key``; three times ``default`` if it
    is missing. Raises FileError unless they are three numbers from ``least`` to 10.
    """
    found = keys.get(key)
    if found is None:
        return (default,) * 3
    numbers = [float(v) for v in found] if isinstance(found, Sequence) else []
    if len(numbers) != 3 or not all(least <= v <= 10.0 for v in numbers):
        keys.fail(key, f"is {found!r:.60}", f"three numbers from {least:g} to 10")
    return tuple(numbers)


def _view(gguf: GGUF, prefix: str, names: Mapping[str, str]) -> GGUF:
    """Return a copy of ``gguf`` with the tensors of one modality, whose ``prefix`` is removed, and
    those without a modality's prefix; no bytes are copied.

    ``names``: graph's names by the file's, for layers' tensors, which get ``blk.N.`` in front.
    Kernels of convolutions become matrices ``[n, all other dims]``. Formats that round activations
    get a variant that does not, since a tower's rows would lose too much.
    """
    made = copy.copy(gguf)
    made.tensors = {}
    for name, tensor in gguf.tensors.items():
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
        elif name.startswith(tuple(set(_PREFIXES.values()) - {prefix})):
            continue
        if match := _LAYER.fullmatch(name):
            i, stem, kind = match.groups()
            name = f"blk.{i}.{names.get(stem, stem)}.{kind}"
        if len(tensor.shape) == 4 or name.startswith(CONVOLUTIONS):
            n, *rest = tensor.shape
            tensor = replace(tensor, shape=(n,) if name.endswith(".bias") else (n, prod(rest)))
        if tensor.format is not None and tensor.format.act == ROUNDED:
            # Rounded activations cost a tower 1e-3 of its rows' values; those of F16 files are not.
            tensor = replace(tensor, format=replace(tensor.format, act=EXACT))
        made.tensors[name] = tensor
    return made


def _moved(tensor: Tensor, order: np.ndarray) -> Bytes:
    rows = tensor.data.reshape(tensor.shape[0], -1)
    made: Bytes = rows[order].reshape(-1)
    return made


def _identity(gguf: GGUF) -> bytes:
    """Return the digest of a file's keys and of its tensors' shapes and some of their bytes.
    Reading all bytes would take seconds.
    """
    keys = {key: value for key, value in gguf.metadata.items() if key.startswith("clip.")}
    state = hashlib.sha256()
    for key, value in sorted(keys.items()):
        plain = value if isinstance(value, (str, int, float)) else list(value)
        state.update(repr((key, plain)).encode())
    for name, tensor in sorted(gguf.tensors.items()):
        state.update(repr((name, tensor.shape, tensor.ggml_type)).encode())
        for array in tensor.arrays:
            raw = array.reshape(-1).view(np.uint8)
            for at in (0, len(raw) // 2, max(0, len(raw) - SAMPLE)):
                state.update(raw[at : at + SAMPLE].tobytes())
    return state.digest()
