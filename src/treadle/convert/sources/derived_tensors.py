"""Tensors that GGUF stores in another form than the checkpoint: stacked experts, split or joined
matrices, logarithms.

A ``DerivationRule`` says which tensors of a layer are made into which others. A derived tensor has
a name in the checkpoint's style and goes through the name tables like any other. Its bytes are
computed when they are read; a converter holds one such tensor at a time, and a model run in place
keeps them in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import DTYPES, SafeTensor
from treadle.formats import by_name

Rows = npt.NDArray[Any]
Make = Callable[..., Rows]  # takes the arrays of its sources
Side = Literal["", "A", "B"]  # of a LoRA pair

MXFP4 = "MXFP4"
FACTOR = ".scale"  # suffix of a factor for a matrix's products
_IN_LAYER = re.compile(r"(?P<layer>.*\b(?:layers?|h|blocks)\.(?P<i>\d+)\.)(?P<rest>.+)")
_ITS_LAYER = re.compile(r"\b(?:layers?|h|blocks)\.\d+\.$")
_OUTSIDE = re.compile(r"(?P<layer>(?:.*\.)?)(?P<rest>\w+\.weight|(?!weight$)\w+)")
EXPERT = re.compile(r"(?P<before>.*\.(?:chunk_)?experts\.)(?P<i>0|[1-9]\d{0,4})\.(?P<rest>.+)")


@dataclass(frozen=True)
class DerivationRule:
    """A rule that derives tensors of a layer from others.

    of: names of the sources, without "layers.N."; outside layers the last two words, or the last
        one if it is not "weight". All of them exist, or none.
    gives: the results by name, each with the function that makes it from all sources; a leading
        slash puts the result outside the layers. Empty: the sources are dropped.
    floats: sources are passed, and results made, as float32; else elements are moved as stored.
    dtype: type of the result, which is then bytes [.., n]; "": that of the first source, or
        float32.
    first_layer, last_layer: the rule applies from the first to the last of these layers.
    layers: if given, the rule applies only to those of them. Of several rules for one source the
        first that applies is used.
    whole: pass an array of three axes as a whole. By default it is a stack of matrices, of which
        ``make`` sees one when the result's shape is determined.
    side: the side of a matrix's LoRA pair that ``make`` also applies to: "B" (it changes rows) or
        "A" (columns); "": adapters of the matrix are refused.
    """

    of: tuple[str, ...]
    gives: Mapping[str, Make]
    floats: bool = False
    dtype: str = ""
    first_layer: int = 0
    last_layer: int = 1 << 20
    layers: frozenset[int] | None = None
    whole: bool = False
    side: Side = ""

    def applies(self, layer: int) -> bool:
        """Return whether the rule applies to layer number ``layer``; pass 0 for tensors outside
        layers.
        """
        within = self.first_layer <= layer <= self.last_layer
        return within and (self.layers is None or layer in self.layers)


@dataclass(frozen=True, eq=False)
class DerivedTensor(SafeTensor):
    """A tensor that ``make`` computes from its sources when it is read. In errors it has the file
    and offset of the first source.
    """

    sources: tuple[SafeTensor, ...] = ()
    make: Make = field(default=np.stack, repr=False)
    floats: bool = False

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, uint8 [n_bytes], computed anew on each access."""
        rows = self.make(*(_array(each, self.floats) for each in self.sources))
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def stored(tensor: SafeTensor) -> tuple[SafeTensor, ...]:
    """Return the tensors in files that a tensor is computed from; an ordinary tensor itself."""
    if not isinstance(tensor, DerivedTensor):
        return (tensor,)
    return tuple(part for each in tensor.sources for part in stored(each))


def make_tensors(
    tensors: Mapping[str, SafeTensor], rules: Sequence[DerivationRule]
) -> dict[str, SafeTensor]:
    """Return the tensors with experts stacked and the rules applied: results replace their sources.

    Raises FileError for experts that are missing or differ, and for a rule with only some of its
    sources.
    """
    result = _stacked(tensors)
    by_name_: dict[str, list[DerivationRule]] = {}
    for each in rules:
        by_name_.setdefault(each.of[0], []).append(each)
    for name, first in list(result.items()):
        match = _IN_LAYER.fullmatch(name) or _OUTSIDE.fullmatch(name)
        if match is None:
            continue
        layer = int(match.groupdict().get("i", 0))
        own = (each for each in by_name_.get(match["rest"], ()) if each.applies(layer))
        if (rule := next(own, None)) is None:
            continue
        sources = []
        for rest in rule.of:
            if (at := match["layer"] + rest) not in result:
                raise first.error(f"exists, but {at} is missing")
            factor = result.pop(at.removesuffix(".weight") + FACTOR, None)
            sources.append(multiplied_out(result.pop(at), factor) if factor else result.pop(at))
        for rest, make in rule.gives.items():
            at = match["layer"] + rest
            if rest.startswith("/"):
                at = _ITS_LAYER.sub("", match["layer"]) + rest[1:]
            result[at] = _made(at, tuple(sources), make, rule)
    return result


def name_in_layer(name: str) -> str:
    """Return a checkpoint tensor's name in the form of ``DerivationRule.of``."""
    match = _IN_LAYER.fullmatch(name) or _OUTSIDE.fullmatch(name)
    return match["rest"] if match else name


def _stacked(tensors: Mapping[str, SafeTensor]) -> dict[str, SafeTensor]:
    """Return the tensors with those of single experts replaced by stacks: E tensors by one [E, ..].
    Raises FileError if an expert's is missing or differs from the others'.
    """
    result: dict[str, SafeTensor] = {}
    experts: dict[str, dict[int, SafeTensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match["before"] + match["rest"], {})[int(match["i"])] = tensor
        else:
            result[name] = tensor
    for name, found in experts.items():
        if len({each.dtype for each in found.values()}) > 1:
            found = {i: multiplied_out(each) for i, each in found.items()}
        first = found[min(found)]
        missing = next((i for i in range(len(found)) if i not in found), None)
        if missing is not None:
            raise first.error(f"exists, but expert {missing} has no such tensor")
        for other in found.values():
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                what = f"shape {list(other.shape)} in {other.dtype}"
                raise other.error(what, f"{list(first.shape)} in {first.dtype}, as {first.name}")
        sources = tuple(found[i] for i in range(len(found)))
        result[name] = DerivedTensor(
            name,
            first.dtype,
            (len(found), *first.shape),
            len(found) * first.n_bytes,
            first.path,
            first.offset,
            first.file,
            sources,
            stacked,
        )
    return result


def _made(
    name: str, sources: tuple[SafeTensor, ...], make: Make, rule: DerivationRule
) -> DerivedTensor:
    as_stored = not (rule.floats or rule.dtype)
    if as_stored and len({each.dtype for each in sources}) > 1:
        sources = tuple(map(multiplied_out, sources))
    first = sources[0]
    for other in sources if as_stored else ():
        if other.dtype != first.dtype:
            raise other.error(f"is in {other.dtype}", f"{first.dtype}, as {first.name}")
    dtype = rule.dtype or ("F32" if rule.floats else first.dtype)
    in_blocks = as_stored and block_of(first.dtype)[0] > 1
    try:
        shape = _shape_of(make, sources, rule.floats, rule.whole)
        if in_blocks and shape[-1:] != elements_of(first)[-1:]:
            raise IndexError("a block would be taken apart")
    except (ValueError, IndexError) as error:
        if in_blocks:
            return _made(name, tuple(map(multiplied_out, sources)), make, rule)
        shapes = ", ".join(str(list(each.shape)) for each in sources)
        raise first.error(f"shape {shapes} does not fit the conversion to {name}") from error
    block, block_bytes = block_of(dtype)
    if rule.dtype:  # the result is bytes
        n_bytes = math.prod(shape)
        shape = (*shape[:-1], shape[-1] // block_bytes)
    else:
        n_bytes = math.prod(shape) * block_bytes
    shape = (*shape[:-1], shape[-1] * block) if block > 1 else shape
    at = first.path, first.offset, first.file
    return DerivedTensor(name, dtype, shape, n_bytes, *at, sources, make, rule.floats)


def multiplied_out(tensor: SafeTensor, factor: SafeTensor | None = None) -> SafeTensor:
    """Return a block-quantised matrix in BF16, so that single weights can be moved; tensors in
    other types unchanged. ``factor`` multiplies all of the matrix, or holds one factor per expert.
    """
    if block_of(tensor.dtype)[0] == 1:
        return tensor
    kind, size = "BF16", 2 * math.prod(tensor.shape)
    at = tensor.path, tensor.offset, tensor.file

    def make(rows: Rows, *factors: Rows) -> Rows:
        for each in factors:
            rows = rows * each.reshape(-1, *[1] * (rows.ndim - 1))
        return by_name(kind).quantize_rows(rows)

    sources = (tensor, factor) if factor else (tensor,)
    return DerivedTensor(tensor.name, kind, tensor.shape, size, *at, sources, make, floats=True)


def _shape_of(
    make: Make, sources: Sequence[SafeTensor], floats: bool, whole: bool = False
) -> tuple[int, ...]:
    """Return the shape of the result of ``make``, without reading weights. ``floats``, ``whole``:
    as in ``DerivationRule``. Of a stack of matrices ``make`` gets only the first, unless ``whole``.
    """
    kind = np.dtype(np.float32 if floats else np.uint8)
    shapes = [each.shape if floats else elements_of(each) for each in sources]
    if many := len(shapes[0]) > 2 and shapes[0][0] > 1 and not whole:
        shapes = [(1, *shape[1:]) for shape in shapes]
    made = make(*(np.broadcast_to(np.zeros((), kind), shape) for shape in shapes))
    return (sources[0].shape[0], *made.shape[1:]) if many else tuple(made.shape)


def _array(tensor: SafeTensor, floats: bool) -> Rows:
    """Return a tensor's values [*shape]: as float32 if ``floats``, else raw elements as stored."""
    if floats:
        values: Rows = by_name(tensor.dtype).dequantize_rows(tensor.data)
        return values.reshape(tensor.shape)
    return elements(tensor)


def elements(tensor: SafeTensor) -> Rows:
    """Return a tensor's raw elements as stored, [*shape]; in block formats elements are blocks,
    [.., K / block].
    """
    shape = elements_of(tensor)
    size = tensor.n_bytes // max(1, math.prod(shape))
    kind: Any = np.uint8 if size == 1 else f"V{size}"
    found: Rows = tensor.data.view(kind)
    return found.reshape(shape)


def elements_of(tensor: SafeTensor) -> tuple[int, ...]:
    """Return the shape of a tensor's raw elements."""
    block, _ = block_of(tensor.dtype)
    return (*tensor.shape[:-1], tensor.shape[-1] // block) if block > 1 else tensor.shape


def block_of(dtype: str) -> tuple[int, int]:
    """Return the number of weights and of bytes in a block of ``dtype``, a ggml type's name;
    safetensors' own types have one weight.
    """
    if dtype in DTYPES:
        return 1, DTYPES[dtype] // 8
    fmt = by_name(dtype)
    return fmt.block, fmt.dtype.itemsize


# -- functions of rules -----------------------------------------------------------------------


def same(rows: Rows) -> Rows:
    """Return the tensor unchanged, for a rule that only renames it, such as one named without a
    "weight" or "bias" suffix.
    """
    return rows


def flat(rows: Rows) -> Rows:
    """Flatten to one dimension."""
    return rows.reshape(-1)


def stacked(*rows: Rows) -> Rows:
    """Stack the arrays along a new first axis."""
    return np.stack(rows)


def taps(rows: Rows) -> Rows:
    """Return a depthwise convolution's [channels, 1, taps] as [channels, taps]."""
    return rows[:, 0]


def upper(rows: Rows) -> Rows:
    """Return the upper half of the rows of each matrix [.., M, K]."""
    return rows[..., : rows.shape[-2] // 2, :]


def lower(rows: Rows) -> Rows:
    """Return the lower half of the rows of each matrix [.., M, K]."""
    return rows[..., rows.shape[-2] // 2 :, :]


def transposed(rows: Rows) -> Rows:
    """Transpose matrices [in, out] to [out, in]."""
    return rows.swapaxes(-1, -2)


def times(rows: Rows, factor: Rows | np.float32) -> Rows:
    """Return ``rows`` times ``factor``, as float32. A ``factor`` that is an array is broadcast to
    the shape of ``rows``.
    """
    return np.asarray(rows * factor, np.float32)


def decay(rows: Rows) -> Rows:
    """Return A = -exp(A_log), the decay rate of recurrent states."""
    return -np.exp(rows)


def mxfp4_blocks(codes: Rows, scales: Rows) -> Rows:
    """Convert OpenAI's blocks [.., K / 32, 16], weights 2i and 2i + 1 in byte i, to ggml's [.., K /
    32 * 17]: the scale's exponent, then weights i and i + 16 in byte i.
    """
    low = codes & 15
    high = codes >> 4
    each = np.stack([low, high], -1).reshape(*codes.shape[:-1], 32)
    joined = each[..., :16] | (each[..., 16:] << 4)
    blocks = np.concatenate([scales[..., None], joined], -1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def norms_of_heads(keys: MetadataReader) -> Sequence[DerivationRule]:
    """Return rules for StableLM 2 12B, whose q and k have a LayerNorm per head: GGUF has the
    weights of all heads in one tensor. Return () for models without these norms.
    """
    if not keys.flag("qk_layernorm", False):
        return ()
    n_head = keys.integer("num_attention_heads")
    counts = {"q": n_head, "k": keys.integer("num_key_value_heads", n_head)}
    return [
        DerivationRule(
            tuple(f"self_attn.{x}_layernorm.norms.{i}.weight" for i in range(n)),
            {f"self_attn.{x}_norm.weight": stacked},
        )
        for x, n in counts.items()
    ]
