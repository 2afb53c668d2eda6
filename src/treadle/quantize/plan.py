"""Quantisation plan: the format of each tensor, from a mix, user rules and row lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from typing import TYPE_CHECKING

from treadle.base.fast_classes import dataclass
from treadle.convert.recipe import OutputTensor, entry_of
from treadle.convert.sources.gguf import source_tensor
from treadle.errors import TreadleError, UnsupportedError
from treadle.formats import FORMATS, Format, by_name
from treadle.quantize.mixes import (
    ALIASES,
    FALLBACKS,
    KEPT,
    LAST_RESORT,
    MIXES,
    TRAINED,
    WANTS_IMATRIX,
    QuantMix,
    TensorRole,
    role_of,
)

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.quantize.imatrix.matrix import ImportanceMatrix

N_LAYER_DEEP = 80
NEXTN = "nextn_predict_layers"
UNSEEN = "Q4_K"  # replaces coarser formats in layers that `imatrix` does not run
NOT_SEEN = "MTP layers without importances"


@dataclass(frozen=True)
class TypeRule:
    """A user's rule: matrices whose name contains a match of the regular expression ``pattern`` get
    the format ``format``.
    """

    pattern: str
    format: str

    @property
    def text(self) -> str:
        return f"{self.pattern}={self.format}"


@dataclass(frozen=True, eq=False)
class Recipe:
    """The output format of every tensor of a file."""

    name: str  # of the mix
    file_type: int | None  # ``general.file_type``
    targets: tuple[OutputTensor, ...]

    @property
    def n_bytes(self) -> int:
        """The output size of all tensors in bytes."""
        return sum(target.n_bytes for target in self.targets)

    @property
    def n_weights(self) -> int:
        return sum(prod(target.tensor.shape) for target in self.targets)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.n_bytes / max(self.n_weights, 1)

    @property
    def quantized(self) -> bool:
        """Whether any output tensor is in a block format, not in plain floats."""
        return any(target.type.block > 1 for target in self.targets)

    @property
    def fallbacks(self) -> dict[tuple[str, str], list[OutputTensor]]:
        """Matrices that got a fallback because the blocks of the mix's format do not divide their
        rows, keyed by the names of the mix's format and the fallback.
        """
        groups: dict[tuple[str, str], list[OutputTensor]] = {}
        for target in self.targets:
            if target.instead_of is not None:
                names = target.instead_of.name, target.type.name
                groups.setdefault(names, []).append(target)
        return groups

    def unused_importances(self, imatrix: ImportanceMatrix) -> dict[str, list[str]]:
        """Return, by format, the names of tensors that ``imatrix`` has importances for, but whose
        format ignores them. Float formats are left out: their rounding needs no importances.
        """
        groups: dict[str, list[str]] = {}
        for target in self.targets:
            fmt = target.encode
            name = target.tensor.name
            if fmt and fmt.block > 1 and not fmt.aware and name in imatrix.entries:
                groups.setdefault(fmt.name, []).append(name)
        return groups

    @property
    def trained(self) -> dict[str, list[OutputTensor]]:
        """Non-expert matrices that become a format which is good only for weights trained in it
        (``TRAINED``), by the format's name.
        """
        groups: dict[str, list[OutputTensor]] = {}
        for target in self.targets:
            if target.encode and target.encode.name in TRAINED and len(target.tensor.shape) == 2:
                groups.setdefault(target.encode.name, []).append(target)
        return groups

    @property
    def wants_imatrix(self) -> list[str]:
        """Names of the tensors whose new format is so coarse that an importance matrix improves
        them most.
        """
        inner = (t for t in self.targets if t.encode and t.encode.name in WANTS_IMATRIX)
        return [t.tensor.name for t in inner]


def find_mix(name: str) -> QuantMix:
    """Return the mix called ``name``, in upper or lower case. A name that is a format's but no
    mix's gives a mix of that format alone. Raises UnsupportedError for other names; its message has
    the nearest ones.
    """
    wanted = ALIASES.get(name.upper(), name.upper())
    if wanted in MIXES:
        return MIXES[wanted]
    for fmt in FORMATS.values():
        if fmt.name.upper() == wanted:
            return QuantMix(fmt.name, fmt.name, None)
    near = get_close_matches(wanted, mix_names(), n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else f"; choose one of {', '.join(MIXES)}"
    raise UnsupportedError(f"unknown mix or weight format {name!r}{hint}")


def mix_names() -> list[str]:
    """Return every name that ``find_mix`` accepts."""
    return list(dict.fromkeys((*MIXES, *(fmt.name for fmt in FORMATS.values()), *ALIASES)))


def parse_rule(text: str) -> TypeRule:
    """Parse a rule ``PATTERN=FORMAT``. Raises TreadleError if it is malformed, UnsupportedError for
    an unknown format.
    """
    pattern, equals, fmt = text.rpartition("=")
    if not equals or not pattern or not fmt:
        raise TreadleError(f"'{text}' is not PATTERN=FORMAT, such as ffn_down=Q6_K")
    try:
        re.compile(pattern)
    except re.error as error:
        raise TreadleError(f"'{pattern}' is not a regular expression: {error}") from error
    return TypeRule(pattern, format_by_name(fmt).name)


def format_by_name(name: str) -> Format:
    """Return the format called ``name``. Raises UnsupportedError if there is none, or GGUF does not
    have it.
    """
    fmt = by_name(name)
    if fmt.ggml_id not in FORMATS:
        raise UnsupportedError(f"GGUF has no weight format {fmt.name}")
    return fmt


def make_recipe(
    gguf: GGUF,
    mix: QuantMix,
    *,
    rules: Sequence[TypeRule] = (),
    output_type: str | None = None,
    embd_type: str | None = None,
    pure: bool = False,
    imatrix: ImportanceMatrix | None = None,
) -> Recipe:
    """Choose a format for every tensor of ``gguf``.

    Matrices get the format that ``mix`` gives; where its blocks do not divide the rows, a fallback
    (``FALLBACKS``), with a note. These override the mix: ``rules`` (the last match wins),
    ``output_type`` and ``embd_type`` (names of the formats of the output matrix and the
    embeddings), and ``pure`` (the mix's base format for all other matrices); such a format must
    fit.

    If ``imatrix`` has no importances for a tensor of a layer that predicts further tokens (no
    program collects them), the format UNSEEN replaces the coarsest formats there; llama.cpp stops.
    Raises UnsupportedError if a requested format cannot hold the rows, TreadleError for a rule that
    no matrix matches.
    """
    if output_type is not None:
        tied = "output.weight" not in gguf.tensors  # then the embeddings are the output too
        name = "token_embd" if tied else "output"
        rules = (*rules, TypeRule(rf"^{name}\.weight$", format_by_name(output_type).name))
    if embd_type is not None:
        rules = (*rules, TypeRule(r"^token_embd\.weight$", format_by_name(embd_type).name))
    places = _TensorRoles(gguf, mix, imatrix is not None)
    unused = set(rules)
    targets = []
    kept = kept_in_projectors(gguf, mix)
    for tensor in gguf.tensors.values():
        if not is_matrix(tensor.name, tensor.shape) or tensor.name in kept:
            targets.append(entry_of(source_tensor(tensor), None))
            continue
        said = [rule for rule in rules if re.search(rule.pattern, tensor.name)]
        unused.difference_update(said)
        if said:
            targets.append(_exactly(tensor, format_by_name(said[-1].format), gguf))
        elif pure:
            targets.append(_exactly(tensor, format_by_name(mix.base), gguf))
        else:
            fmt = format_by_name(mix.format_for(*places(tensor)))
            lacks = imatrix is not None and tensor.name not in imatrix.entries
            if lacks and fmt.name in WANTS_IMATRIX and places.predicts(tensor):
                made = _fallback_entry(tensor, by_name(UNSEEN))
                targets.append(replace(made, note=made.note or NOT_SEEN))
            else:
                targets.append(_fallback_entry(tensor, fmt))
    for rule in rules:
        if rule in unused:
            raise TreadleError(
                f"{gguf.path}: no matrix name matches '{rule.text}' "
                "(rules do not apply to norms, biases and other vectors)"
            )
    return Recipe(mix.name, mix.file_type, tuple(targets))


def is_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether mixes and rules apply to a tensor called ``name`` of shape ``shape``; others
    keep their type.
    """
    rows = prod(shape[:-1])  # a single row (a shared expert's gate) counts as a vector
    return len(shape) >= 2 and rows > 1 and name.endswith("weight") and not KEPT.search(name)


# Matrices that projector files store transposed, by projector type.
TRANSPOSED = {"gemma3": frozenset({"mm.input_projection.weight"})}


def kept_in_projectors(gguf: GGUF, mix: QuantMix) -> frozenset[str]:
    """Return the names of the matrices in the projector file ``gguf`` that ``mix`` must not
    quantise, because llama.cpp transposes them and cannot transpose blocks; empty for other files.
    """
    projector_type = str(gguf.metadata.get("clip.projector_type", ""))
    blocks = format_by_name(mix.base).block > 1
    return TRANSPOSED.get(projector_type, frozenset()) if blocks else frozenset()


def nearest(fmt: Format, k: int) -> Format:
    """Return ``fmt``, or the first of its fallbacks whose blocks divide rows of ``k`` weights."""
    while k % fmt.block:
        fmt = by_name(FALLBACKS.get(fmt.name, LAST_RESORT))
    return fmt


def _fallback_entry(tensor: Tensor, wanted: Format) -> OutputTensor:
    k = tensor.shape[-1]
    fmt = nearest(wanted, k)
    if fmt is wanted:
        return entry_of(source_tensor(tensor), fmt)
    note = f"rows of {k} weights are not a multiple of {wanted.name}'s block of {wanted.block}"
    return replace(entry_of(source_tensor(tensor), fmt, note), instead_of=wanted)


def _exactly(tensor: Tensor, wanted: Format, gguf: GGUF) -> OutputTensor:
    k = tensor.shape[-1]
    if k % wanted.block:
        raise UnsupportedError(
            f"{gguf.path}: {tensor.name}: {wanted.name} needs rows that are multiples of "
            f"{wanted.block}; these have {k} weights; use {nearest(wanted, k).name}"
        )
    return entry_of(source_tensor(tensor), wanted)


class _TensorRoles:
    """Callable: returns the role of a tensor of one file, and its ``TensorRole``."""

    def __init__(self, gguf: GGUF, mix: QuantMix, imatrix: bool) -> None:
        meta = gguf.metadata
        arch = str(meta.get("general.architecture", ""))
        prefix = {"clip": "clip.vision", "whisper": "whisper.decoder"}.get(arch, arch)
        n_head = _largest(meta, f"{prefix}.attention.head_count", 1)
        n_head_kv = _largest(meta, f"{prefix}.attention.head_count_kv", n_head)
        n_layer = _largest(meta, f"{prefix}.block_count", 0)
        self.n_layer = n_layer
        self.tied = "output.weight" not in gguf.tensors
        self.n_further = _largest(meta, f"{arch}.{NEXTN}", 0)
        self.block = format_by_name(mix.base).block
        self.model = TensorRole(
            layer=0,
            n_layer=n_layer,
            n_gqa=n_head // max(n_head_kv, 1),
            n_expert=_largest(meta, f"{arch}.expert_count", 0),
            arch=arch,
            deep=n_layer == N_LAYER_DEEP and n_head != n_head_kv,
            imatrix=imatrix,
            fits=True,
            expert=False,
        )
        # Only some layers of a hybrid model have attention: number those layers separately.
        attended = sorted(
            _layer(name)
            for name, t in gguf.tensors.items()
            if role_of(name) == "attn_v" and len(t.shape) >= 2
        )
        self.attended = {layer: i for i, layer in enumerate(attended)}

    def __call__(self, tensor: Tensor) -> tuple[str, TensorRole]:
        role = role_of(tensor.name)
        layer = _layer(tensor.name)
        n_layer = self.n_layer
        if role == "attn_v":
            layer = self.attended[layer]
            n_layer = len(self.attended)
        if self.tied and tensor.name == "token_embd.weight":
            role = "output"  # tied embeddings
        return role, replace(
            self.model,
            layer=layer,
            n_layer=n_layer,
            fits=tensor.shape[-1] % self.block == 0,
            expert=len(tensor.shape) > 2 and tensor.shape[-3] > 1,
        )

    def predicts(self, tensor: Tensor) -> bool:
        """Whether the tensor belongs to a layer that predicts further tokens (multi-token
        prediction).
        """
        match = re.match(r"blk\.(\d+)\.", tensor.name)
        return match is not None and self.n_layer - self.n_further <= int(match[1]) < self.n_layer


def _layer(name: str) -> int:
    found = re.match(r"(?:[av]\.|enc\.|dec\.)?blk\.(\d+)\.", name)
    return int(found[1]) if found else 0


def _largest(meta: Mapping[str, object], key: str, default: int) -> int:
    """Return the integer in metadata ``meta`` at ``key``, or the largest of a per-layer array
    there; ``default`` if there is neither.
    """
    value = meta.get(key, default)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return max((v for v in value if isinstance(v, int)), default=default)
    return value if isinstance(value, int) else default
