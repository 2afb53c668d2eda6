"""Tensors that GGUF has and a checkpoint has otherwise: experts that lie one by one, two matrices
in one, logarithms.

A ``DerivationRule`` says what is made of which tensors of a layer. What is made has a name as the
checkpoint would spell it, and goes through the tables of names like any other; its bytes are put
together when they are asked for, and a converter holds one such tensor at a time. What runs in
place has them in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from treadle.base.fast_dataclass import dataclass
from treadle.files.keys import MetadataReader
from treadle.files.safetensors import DTYPES, SafeTensor
from treadle.formats import by_name

Rows = npt.NDArray[Any]
Make = Callable[..., Rows]  # of the arrays of its sources
Side = Literal["", "A", "B"]  # of an adapter's pair

MXFP4 = "MXFP4"
FACTOR = ".scale"  # of a number by which a matrix's products are multiplied
_IN_LAYER = re.compile(r"(?P<layer>.*\b(?:layers?|h|blocks)\.(?P<i>\d+)\.)(?P<rest>.+)")
_ITS_LAYER = re.compile(r"\b(?:layers?|h|blocks)\.\d+\.$")
_OUTSIDE = re.compile(r"(?P<layer>(?:.*\.)?)(?P<rest>\w+\.weight)")
EXPERT = re.compile(r"(?P<before>.*\.(?:chunk_)?experts\.)(?P<i>0|[1-9]\d{0,4})\.(?P<rest>.+)")


@dataclass(frozen=True)
class DerivationRule:
    """of: names behind "layers.N.", or the last two words of one outside; all there or none.
    gives: what becomes of them, by name; with a slash in front it stands outside the layers.
    floats: arrays are given, and made, as float32; else elements are moved as they are stored.
    dtype: what is made is in this, bytes [.., n]; "": in that of the first, or float32.
    first_layer, last_layer: it is for these and those between them.
    whole: of arrays of three axes the first is no row of matrices alike.
    side: what ``gives`` does to a matrix, it does to an adapter's B (rows), or to its A (columns);
        "": an adapter of the matrix cannot be mapped.
    """

    of: tuple[str, ...]
    gives: Mapping[str, Make]
    floats: bool = False
    dtype: str = ""
    first_layer: int = 0
    last_layer: int = 1 << 20
    whole: bool = False
    side: Side = ""


@dataclass(frozen=True, eq=False)
class DerivedTensor(SafeTensor):
    """What ``make`` gives of its sources. It says that it is where the first of them is."""

    sources: tuple[SafeTensor, ...] = ()
    make: Make = field(default=np.stack, repr=False)
    floats: bool = False

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """uint8 [n_bytes], in memory."""
        rows = self.make(*(_array(each, self.floats) for each in self.sources))
        return np.ascontiguousarray(rows).reshape(-1).view(np.uint8)


def stored(tensor: SafeTensor) -> tuple[SafeTensor, ...]:
    """The tensors of files that one is made of: itself, mostly."""
    if not isinstance(tensor, DerivedTensor):
        return (tensor,)
    return tuple(part for each in tensor.sources for part in stored(each))


def make_tensors(
    tensors: Mapping[str, SafeTensor], rules: Sequence[DerivationRule]
) -> dict[str, SafeTensor]:
    """The same with experts in one tensor, and what the rules say done. FileError for experts that
    are missing or not alike, and for a part of what a rule needs.
    """
    made, by_name_ = _stacked(tensors), {rule.of[0]: rule for rule in rules}
    for name, first in list(made.items()):
        match = _IN_LAYER.fullmatch(name) or _OUTSIDE.fullmatch(name)
        if match is None or (rule := by_name_.get(match["rest"])) is None:
            continue
        if not rule.first_layer <= int(match.groupdict().get("i", 0)) <= rule.last_layer:
            continue
        sources = []
        for rest in rule.of:
            if (at := match["layer"] + rest) not in made:
                raise first.error(f"is there without {at}")
            factor = made.pop(at.removesuffix(".weight") + FACTOR, None)
            sources.append(multiplied_out(made.pop(at), factor) if factor else made.pop(at))
        for rest, make in rule.gives.items():
            at = match["layer"] + rest
            if rest.startswith("/"):
                at = _ITS_LAYER.sub("", match["layer"]) + rest[1:]
            made[at] = _made(at, tuple(sources), make, rule)
    return made


def name_in_layer(name: str) -> str:
    """A tensor's name as rules know it."""
    match = _IN_LAYER.fullmatch(name) or _OUTSIDE.fullmatch(name)
    return match["rest"] if match else name


def _stacked(tensors: Mapping[str, SafeTensor]) -> dict[str, SafeTensor]:
    """Experts' matrices, [E, ..] in place of E tensors."""
    made: dict[str, SafeTensor] = {}
    experts: dict[str, dict[int, SafeTensor]] = {}
    for name, tensor in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(match["before"] + match["rest"], {})[int(match["i"])] = tensor
        else:
            made[name] = tensor
    for name, found in experts.items():
        if len({each.dtype for each in found.values()}) > 1:
            found = {i: multiplied_out(each) for i, each in found.items()}
        first = found[min(found)]
        missing = next((i for i in range(len(found)) if i not in found), None)
        if missing is not None:
            raise first.error(f"is there, and expert {missing} has none such")
        for other in found.values():
            if (other.shape, other.dtype) != (first.shape, first.dtype):
                what = f"shape {list(other.shape)} in {other.dtype}"
                raise other.error(what, f"{list(first.shape)} in {first.dtype}, as {first.name}")
        sources = tuple(found[i] for i in range(len(found)))
        made[name] = DerivedTensor(
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
    return made


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
        raise first.error(f"shape {shapes}: nothing that {name} can be made of") from error
    block, block_bytes = block_of(dtype)
    if rule.dtype:  # what is made are bytes
        n_bytes, shape = math.prod(shape), (*shape[:-1], shape[-1] // block_bytes)
    else:
        n_bytes = math.prod(shape) * block_bytes
    shape = (*shape[:-1], shape[-1] * block) if block > 1 else shape
    at = first.path, first.offset, first.file
    return DerivedTensor(name, dtype, shape, n_bytes, *at, sources, make, rule.floats)


def multiplied_out(tensor: SafeTensor, factor: SafeTensor | None = None) -> SafeTensor:
    """A matrix in blocks as one in BF16, whose weights can go to other places; ``factor``: by which
    all of it is multiplied, of experts one for each.
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
    """What ``make`` would give; of many matrices one is tried, for they are alike."""
    kind = np.dtype(np.float32 if floats else np.uint8)
    shapes = [each.shape if floats else elements_of(each) for each in sources]
    if many := len(shapes[0]) > 2 and shapes[0][0] > 1 and not whole:
        shapes = [(1, *shape[1:]) for shape in shapes]
    made = make(*(np.broadcast_to(np.zeros((), kind), shape) for shape in shapes))
    return (sources[0].shape[0], *made.shape[1:]) if many else tuple(made.shape)


def _array(tensor: SafeTensor, floats: bool) -> Rows:
    """[*shape]: elements as they are, without a meaning, or as float32."""
    if floats:
        values: Rows = by_name(tensor.dtype).dequantize_rows(tensor.data)
        return values.reshape(tensor.shape)
    return elements(tensor)


def elements(tensor: SafeTensor) -> Rows:
    """[*shape], as they are stored and without a meaning; of blocks [.., K / block]."""
    shape = elements_of(tensor)
    size = tensor.n_bytes // max(1, math.prod(shape))
    kind: Any = np.uint8 if size == 1 else f"V{size}"
    found: Rows = tensor.data.view(kind)
    return found.reshape(shape)


def elements_of(tensor: SafeTensor) -> tuple[int, ...]:
    """Their shape."""
    block, _ = block_of(tensor.dtype)
    return (*tensor.shape[:-1], tensor.shape[-1] // block) if block > 1 else tensor.shape


def block_of(dtype: str) -> tuple[int, int]:
    """Weights and bytes of a block; one of a type of safetensors'."""
    if dtype in DTYPES:
        return 1, DTYPES[dtype] // 8
    fmt = by_name(dtype)
    return fmt.block, fmt.dtype.itemsize


# -- what rules make --------------------------------------------------------------------------


def same(rows: Rows) -> Rows:
    """For a name that has no "weight" or "bias" behind it."""
    return rows


def flat(rows: Rows) -> Rows:
    """Without the ones of a shape, or all in one row."""
    return rows.reshape(-1)


def stacked(*rows: Rows) -> Rows:
    """Each in a row of its own."""
    return np.stack(rows)


def taps(rows: Rows) -> Rows:
    """A convolution's [channels, 1, taps], of each channel by itself."""
    return rows[:, 0]


def upper(rows: Rows) -> Rows:
    """The first half of the rows of each matrix."""
    return rows[..., : rows.shape[-2] // 2, :]


def lower(rows: Rows) -> Rows:
    """The second half."""
    return rows[..., rows.shape[-2] // 2 :, :]


def turned(rows: Rows) -> Rows:
    """Matrices [in, out] as [out, in]."""
    return rows.swapaxes(-1, -2)


def decay(rows: Rows) -> Rows:
    """A of its logarithm, as states decay by it."""
    return -np.exp(rows)


def mxfp4_blocks(codes: Rows, scales: Rows) -> Rows:
    """OpenAI's blocks [.., K / 32, 16], weights 2i and 2i + 1 in byte i, as ggml's [.., K / 32 *
    17]: the scale's exponent, then weights i and i + 16 in byte i.
    """
    low, high = codes & 15, codes >> 4
    each = np.stack([low, high], -1).reshape(*codes.shape[:-1], 32)
    joined = each[..., :16] | (each[..., 16:] << 4)
    blocks = np.concatenate([scales[..., None], joined], -1)
    return blocks.reshape(*blocks.shape[:-2], -1)


def norms_of_heads(keys: MetadataReader) -> Sequence[DerivationRule]:
    """StableLM 2 12B has a LayerNorm for each head; GGUF has their weights in one tensor."""
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
