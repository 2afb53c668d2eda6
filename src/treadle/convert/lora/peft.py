"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.row_order import by_matrix
from treadle.convert.lora.peft_experts import ALONE, ExpertPair, group_by_module, stack
from treadle.convert.lora.peft_modules import Modules
from treadle.convert.lora.peft_parameters import (
    ParameterPair,
    find_parameters,
    is_straight,
    read_parameter,
)
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import open_safetensors, read_json
from treadle.formats import FORMATS
from treadle.models.lora import LowRank, transposed

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

    from treadle.convert.lora.peft_modules import PeftModule
    from treadle.convert.sources.derived_tensors import Make
    from treadle.files.gguf import GGUF
    from treadle.files.safetensors import SafeTensor
    from treadle.models.config import Config, Layer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
GGML_TYPE = {"F32": 0, "F16": 1, "BF16": 30}
KEY = re.compile(
    r"base_model\.model\.(?P<module>.+)\."
    r"(?:lora_(?P<side>[AB])(?:\.\w+)?\.weight|lora_embedding_(?P<of_table>[AB])(?:\.\w+)?)"
)
NOT_ADDED = {  # keys of adapters that are more than B A, and their meaning
    "use_dora": "DoRA, which scales rows of the sum",
    "modules_to_save": "fully trained modules",
    "trainable_token_indices": "trained token embeddings",
    "layer_replication": "duplicated layers",
    "lora_bias": "trained biases",
    "alora_invocation_tokens": "an activated LoRA, which starts mid-prompt",
    "use_qalora": "QA-LoRA, which pools its inputs",
    "use_bdlora": "BD-LoRA, which has block-diagonal matrices",
    "arrow_config": "Arrow, which routes each token to an adapter",
    "kasa_config": "KaSA, which removes singular values from the model's weights",
}
# Initialisations for which PEFT changes the model's weights on every load: it subtracts B A, or
# rounds the remainder.
TAKEN_OFF = ("pissa", "olora", "corda", "loftq")

Floats = npt.NDArray[np.float32]


@dataclass
class Peft:
    """A PEFT folder, read for models of one architecture.

    Rows of B are in transformers' order, except for matrices whose rows GGUF reorders as a whole.
    """

    path: Path
    ranks: dict[str, LowRank]  # A, B and factor of each matrix, by GGUF's name of the matrix
    paired: bool  # transformers has RoPE pairs adjacent in a head, as GGUF does: no reordering
    mark: bytes  # sha256 of the settings and all weights: equal adapters have equal marks
    # Element types of A and B ("F32", "BF16") in the file, by GGUF's name of the matrix.
    types: dict[str, tuple[str, str]] = field(default_factory=dict)


def is_peft(path: Path) -> bool:
    """Return whether ``path`` is a folder with adapter_config.json, or a safetensors file in it."""
    return ((path if path.is_dir() else path.parent) / CONFIG).is_file() and (
        path.is_dir() or path.suffix == ".safetensors"
    )


def open_peft(path: Path, gguf: GGUF, config: Config) -> Peft:
    """Read a folder for the model ``gguf``.

    Raises FileError for damaged files; UnsupportedError for adapters that are not W + s B A (such
    as DoRA), and for modules without a matrix in the model.
    """
    folder = path if path.is_dir() else path.parent
    keys = MetadataReader(read_json(folder / CONFIG), folder / CONFIG)
    _refuse(keys)
    _check_weights(folder)
    try:
        modules = Modules(gguf, config.arch.name)
    except UnsupportedError as error:
        raise UnsupportedError(f"{folder}: {error}") from None
    weights = open_safetensors(folder / WEIGHTS)
    state = hashlib.sha256(repr(sorted(keys.values.items())).encode())
    pairs, tables = _pairs_of(weights.tensors.values(), state)
    found: dict[str, ExpertPair] = {}
    result = Peft(folder, {}, modules.families[0].paired, state.digest())
    parameters: list[ParameterPair] = []
    for module, pair in pairs.items():
        _check_pair(pair)
        if modules.is_unread(module):
            continue
        a = pair["A"]
        b = pair["B"]
        types = a.dtype, b.dtype
        if (experts := find_parameters(module, gguf)) is None:
            rank = a.shape[0] if len(a.shape) == 2 else 0
            found[module] = ExpertPair(a, b, _factor(keys, module, rank), types)
            continue
        parameters.append(ParameterPair(experts, a, b, _targets(keys)))
    straight = is_straight(parameters, modules, keys.get("peft_version"))
    for of in parameters:
        for parameter, name, low in read_parameter(of, modules, _floats, straight=straight):
            factor = _factor(keys, f"{of.of.module}.{parameter}", low.rank)
            result.ranks[name] = replace(low, factor=factor)
            result.types[name] = of.a.dtype, of.b.dtype
    for module, each in group_by_module(found).items():
        parts = _parts(module, modules, next(iter(each.values())).a)
        whole = each[ALONE] if ALONE in each else stack(each, _n_expert(gguf, parts[0], each))
        for part in parts:
            low = _pair(part, whole, config)
            types = whole.types
            if module in tables:  # [rank, n_vocab] and [n_embd, rank]
                low = transposed(low)
                types = (types[1], types[0])
            result.ranks[part.name] = low
            result.types[part.name] = types
    if not result.ranks:
        raise FileError("has no tensors", path=folder / WEIGHTS)
    return result


def _check_weights(folder: Path) -> None:
    """Raise FileError or UnsupportedError if the folder has no weights as safetensors."""
    if not (folder / WEIGHTS).is_file():
        others = sorted(p.name for p in folder.glob("adapter_model.*"))
        if others:
            raise UnsupportedError(f"{folder}: weights in {others[0]}: save them as safetensors")
        raise FileError("is missing", path=folder / WEIGHTS)


def _pairs_of(
    tensors: Iterable[SafeTensor], state: Hash
) -> tuple[dict[str, dict[str, SafeTensor]], set[str]]:
    """Return the tensors of an adapter by module and side ("A", "B"), and the modules that are
    embedding tables. Names and contents are added to the hash ``state``. Raises UnsupportedError
    for other tensors.
    """
    pairs: dict[str, dict[str, SafeTensor]] = {}
    tables: set[str] = set()
    for tensor in tensors:
        match = KEY.fullmatch(tensor.name)
        if match is None:
            raise UnsupportedError(f"{tensor.path}: {tensor.name}: {_problem_of(tensor.name)}")
        side = match["side"] or match["of_table"]
        pairs.setdefault(match["module"], {})[side] = tensor
        if match["of_table"]:
            tables.add(match["module"])
        state.update(tensor.name.encode())
        state.update(tensor.data.tobytes())
    return pairs, tables


def _check_pair(pair: dict[str, SafeTensor]) -> None:
    """Raise UnsupportedError for an unsupported type, FileError for half of a pair."""
    for tensor in pair.values():
        if tensor.dtype not in GGML_TYPE:
            raise UnsupportedError(f"{tensor.path}: {tensor.name}: is {tensor.dtype}")
    if len(pair) < 2:
        (tensor,) = pair.values()
        raise tensor.error("is one half of a pair", "lora_A and lora_B")


def _refuse(keys: MetadataReader) -> None:
    kind = keys.get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{keys.path}: peft_type {kind!r:.40}: treadle supports only LORA")
    for key, what in NOT_ADDED.items():
        if keys.get(key):
            raise UnsupportedError(f"{keys.path}: {key}: {what}: not supported")
    begun = keys.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(TAKEN_OFF):
        what = f"init_lora_weights {begun:.40}: PEFT subtracts it from the model's weights"
        raise UnsupportedError(
            f"{keys.path}: {what}: convert the adapter to a plain LoRA and save it again"
        )
    if keys.get("bias") not in (None, "none"):
        raise UnsupportedError(
            f"{keys.path}: bias {keys.get('bias')!r:.40}: trained biases are not supported"
        )


def _problem_of(name: str) -> str:
    if "lora_magnitude_vector" in name:
        return "is a DoRA tensor, which scales rows of the sum: not supported"
    return "is neither lora_A nor lora_B"


def _parts(module: str, modules: Modules, tensor: SafeTensor) -> list[PeftModule]:
    """Return the model's matrices for a module. Raises UnsupportedError, naming ``tensor``, for
    none.
    """
    try:
        return modules.find(module)
    except UnsupportedError as error:
        raise UnsupportedError(f"{tensor.path}: {tensor.name}: an adapter of {error}") from None


def _n_expert(gguf: GGUF, part: PeftModule, each: Mapping[int, ExpertPair]) -> int:
    """Return the number of experts in the model's matrix ``part.name``; if the model lacks it, the
    largest index in ``each`` (pairs by expert) plus one.
    """
    matrix = gguf.tensors.get(part.name)
    return matrix.shape[0] if matrix is not None and len(matrix.shape) == 3 else max(each) + 1


def _pair(part: PeftModule, pair: ExpertPair, config: Config) -> LowRank:
    """Return the matrices A and B of an adapter (``pair``) for one GGUF tensor as ``LowRank``,
    which reads them on demand. If the GGUF matrix has its rows or columns in another order than the
    checkpoint's, ``part.make`` brings the side ``part.side`` ("A" or "B") into that order.
    """
    a = pair.a
    b = pair.b
    rank = a.shape[-2] if len(a.shape) > 1 else 0
    own: dict[str, tuple[Callable[[], Floats], tuple[int, ...]]] = {
        "A": (partial(_floats, a), a.shape),
        "B": (partial(_floats, b), b.shape),
    }
    if part.make is not None:
        tensor = {"A": a, "B": b}[part.side]
        own[part.side] = partial(_transform, tensor, part.make), _transformed_shape(tensor, part)
    elif part.family.by_head and part.name.endswith("attn_qkv.weight"):
        own["B"] = partial(_by_matrix, b, config.layers[0]), b.shape
    (read_a, a_shape), (read_b, b_shape) = own["A"], own["B"]
    return LowRank(rank, pair.factor, read_a, read_b, a_shape, b_shape)


def _targets(keys: MetadataReader) -> list[str]:
    """Return the last words of the names in ``target_parameters``: parameters, not modules, that
    have adapters.
    """
    given = keys.get("target_parameters")
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        keys.fail("target_parameters", f"is {given!r:.40}", "a list of names")
    return [each.rpartition(".")[2] for each in given]


def _factor(keys: MetadataReader, module: str, rank: int) -> float:
    return _alpha(keys, module) / (math.sqrt(max(rank, 1)) if _is_rslora(keys) else max(rank, 1))


def _alpha(keys: MetadataReader, module: str) -> float:
    """Return a module's alpha. As in PEFT, a regular expression of ``alpha_pattern`` must match the
    whole name or its end after a dot; else ``lora_alpha`` applies.
    """
    patterns: Any = keys.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        keys.fail("alpha_pattern", f"is {patterns!r:.40}", "an object")
    for pattern in patterns:
        try:
            fits = re.fullmatch(rf"(?:.*\.)?(?:{pattern})", module)
        except re.error as error:
            keys.fail("alpha_pattern", f"{pattern!r:.40}: {error}", "regular expressions")
        if fits:
            return MetadataReader(patterns, keys.path, prefix="alpha_pattern.").number(
                pattern, lo=0.0
            )
    return keys.number("lora_alpha", 8.0, lo=0.0)


def _is_rslora(keys: MetadataReader) -> bool:
    """Return whether the adapter is rsLoRA, whose scale is alpha / sqrt(rank) in place of alpha /
    rank.
    """
    return keys.flag("use_rslora", False)


def _floats(tensor: SafeTensor) -> Floats:
    values = FORMATS[GGML_TYPE[tensor.dtype]].dequantize_rows(tensor.data)
    if not np.isfinite(values).all():
        raise tensor.error("holds a value that is not a finite number")
    return values.reshape(tensor.shape)


def _by_matrix(tensor: SafeTensor, layer: Layer) -> Floats:
    return np.asarray(by_matrix(_floats(tensor), layer.n_head, layer.n_head_kv), np.float32)


def _transform(tensor: SafeTensor, make: Make) -> Floats:
    return np.ascontiguousarray(make(_floats(tensor)), np.float32)


def _transformed_shape(tensor: SafeTensor, part: PeftModule) -> tuple[int, ...]:
    """Return the shape that ``part.make`` gives the tensor, A or B of an adapter, without reading
    its values. Raises FileError if the tensor does not fit.
    """
    assert part.make is not None
    try:
        shape: tuple[int, ...] = part.make(np.zeros(tensor.shape, np.float32)).shape
    except (ValueError, IndexError):
        found = f"shape {list(tensor.shape)} does not fit the conversion to {part.name}"
        raise tensor.error(found) from None
    return shape
