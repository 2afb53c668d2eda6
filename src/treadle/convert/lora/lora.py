"""LoRA adapters for one model: llama.cpp's GGUF files and PEFT folders.

GGUF: ``general.type`` adapter, ``adapter.type`` lora, ``adapter.lora.alpha``, and for a matrix
``NAME [m, k]`` the tensors ``NAME.lora_a [rank, k]`` and ``NAME.lora_b [m, rank]``. The sum is W +
``alpha / rank`` B A. Rows of B are in a GGUF model's order. Matrices of experts ``[E, m, k]`` have
``[E, rank, k]`` and ``[E, m, rank]``. Embeddings ``[n_vocab, n_embd]`` have ``[n_vocab, rank]`` and
``[n_embd, rank]``: A B^T is added to them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from treadle.base.validate import file_name, is_number
from treadle.convert.hf.family import PAIRS
from treadle.convert.hf.row_order import IN_PLACE, halves_to_pairs
from treadle.convert.lora.fused import match_matrices
from treadle.convert.lora.peft import is_peft, open_peft
from treadle.convert.lora.tasks import is_task, open_task
from treadle.convert.open import open_model
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.files.target import check_target, files_of
from treadle.formats import by_name
from treadle.models.archs import ARCHS
from treadle.models.load import ROPE_KEY, load_config, renamed
from treadle.models.lora import EMBEDDINGS, TYPES, Adapter, LowRank, lora_scale, transposed

if TYPE_CHECKING:
    from treadle.convert.lora.peft import Peft
    from treadle.engine.engine import Engine
    from treadle.files.gguf import GGUF
    from treadle.files.tensor import Tensor
    from treadle.formats import Format
    from treadle.models.config import Config

Floats = npt.NDArray[np.float32]
Name = str | bytes | os.PathLike[str]
Scaled = Name | tuple[Name, float]
Adapters = Sequence[Scaled] | Mapping[Any, float]
SUFFIXES = (".lora_a", ".lora_b")
REFUSED = {  # matrices that a plan does not use as a product of all rows
    "output.weight": "the output matrix",
}
TURNED = (".attn_q.weight", ".attn_k.weight")


def open_adapter(path: Name, gguf: GGUF, config: Config) -> Adapter:
    """Open an adapter for the model ``gguf`` with this ``config``: a GGUF file, a PEFT folder, or a
    task's adapter in a model's folder.

    Raises FileError if it is damaged, of another architecture or does not fit the model;
    UnsupportedError for an adapter that treadle cannot add.
    """
    path = file_name(path).expanduser()
    if is_peft(path):
        adapter = _of_peft(
            open_peft(path, gguf, config), config, pairs=ROPE_KEY not in gguf.metadata
        )
    elif is_task(path):
        adapter = open_task(path, gguf, config)
    else:
        adapter = _of_gguf(path, gguf, config)
    return _checked(adapter, gguf, config)


def load_adapters(given: Iterable[Scaled], engine: Engine) -> None:
    """Load adapters into an engine; new requests use them. ``given``: each a path or (path, scale),
    with scale 1 by default.

    A duplicate name gets a number appended. Errors as ``open_adapter``'s, and TreadleError for
    other values.
    """
    adapters: list[Adapter] = []
    scales: list[float] = []
    for one in given:
        path, scale = one if isinstance(one, tuple) and len(one) == 2 else (one, 1.0)
        if not isinstance(path, str | bytes | os.PathLike):
            raise TreadleError(f"lora: {one!r:.80}: expected a path or a (path, scale) pair")
        scale = lora_scale(f"lora: {one!r:.80}", scale)
        adapter = open_adapter(path, engine.gguf, engine.config)
        names = {a.name for a in adapters}
        others = (name for i in count(2) if (name := f"{adapter.name}-{i}") not in names)
        adapters.append(replace(adapter, name=next(others)) if adapter.name in names else adapter)
        scales.append(scale)
    engine.adapt(adapters)
    engine.cache.lora = tuple((i, scale) for i, scale in enumerate(scales) if scale)


def _of_gguf(path: Path, model: GGUF, config: Config) -> Adapter:
    file = open_gguf(path)
    keys = file.metadata
    arch = config.arch.name
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if keys.get(key) != wanted:
            raise FileError(f"is {keys.get(key)!r:.40}", path=path, where=key, expected=wanted)
    if keys.get("general.architecture") != arch:
        what = f"is for a {keys.get('general.architecture')!s:.40} model"
        expected = f"an adapter for a {arch} model"
        raise FileError(what, path=path, where="general.architecture", expected=expected)
    if "adapter.alora.invocation_tokens" in keys:
        raise UnsupportedError(f"{path}: an activated LoRA, which starts mid-prompt: not supported")
    alpha = keys.get("adapter.lora.alpha", 0.0)
    if not is_number(alpha) or not np.isfinite(alpha):
        raise FileError(f"is {alpha!r:.40}", path=path, where="adapter.lora.alpha")
    ranks = {}
    for name, a, b in _pairs(file):
        named = name
        for theirs, ours in config.arch.names:
            named = renamed(named, theirs, ours)
        is_table = named == EMBEDDINGS
        rank = a.shape[-1 if is_table else -2] if len(a.shape) > 1 else 0
        move = _heads(named, config) if model.metadata.get(ROPE_KEY) == IN_PLACE else 0
        moved = partial(_pairs_to_halves, b, move, _share(named, config) if move else 1.0)
        low = LowRank(
            rank,
            float(alpha) / rank if alpha and rank else 1.0,
            partial(_transposed, a) if is_table else partial(_floats, a),
            moved if move else partial(_floats, b),
            a.shape[::-1] if is_table else a.shape,
            b.shape,
        )
        ranks[named] = transposed(low) if is_table else low
    return Adapter(path.stem, path, ranks, _mark(file.tensors, alpha))


def _pairs(file: GGUF) -> list[tuple[str, Tensor, Tensor]]:
    """Return (matrix, A, B) for each matrix of a GGUF adapter. Raises FileError for a tensor that
    is not half of a pair, and if there are none.
    """
    found = []
    for name, tensor in file.tensors.items():
        stem = name[: -len(SUFFIXES[0])]
        suffix = name[-len(SUFFIXES[0]) :]
        if suffix not in SUFFIXES:
            raise tensor.error("is no tensor of an adapter", "names that end in .lora_a or .lora_b")
        other = stem + SUFFIXES[suffix == SUFFIXES[0]]
        if other not in file.tensors:
            raise tensor.error("is one half of a pair", other)
        if suffix == SUFFIXES[0]:
            found.append((stem, tensor, file.tensors[other]))
    if not found:
        raise FileError("has no tensors", path=file.path, expected="pairs of .lora_a and .lora_b")
    return found


def write_adapter(
    folder: Path, base: Path, target: Path, fmt: Format | None = None, *, force: bool = False
) -> int:
    """Write a PEFT folder, or a task's adapter, as a GGUF adapter for models like ``base``. Return
    the file's size in bytes. On errors no file is written.

    ``fmt``: format of A and B; None: the types that they have. A GGUF file has one alpha: if
    factors differ between matrices, the rest goes into B. Errors as ``open_adapter``'s; FileError
    if ``target`` exists without ``force``.
    """
    check_target(target, files_of(folder, base), force=force)
    with open_model(base) as gguf:
        config = load_config(gguf)
        peft = None if is_task(folder) else open_peft(folder, gguf, config)
        if peft is None:
            adapter = open_task(folder, gguf, config)
        else:
            adapter = _of_peft(peft, config, pairs=gguf.metadata.get(ROPE_KEY) != PAIRS)
        adapter = _checked(adapter, gguf, config)
    # Not 0: in a GGUF adapter, alpha 0 means factors of 1.
    alpha = next((low.factor * low.rank for low in adapter.ranks.values() if low.factor), 1.0)
    writer = GGUFWriter(target)
    said = {"general.type": "adapter", "general.architecture": config.arch.name}
    said |= {"general.name": adapter.name, "adapter.type": "lora"}
    if peft is None:
        said["adapter.lora.task_name"] = adapter.name
    for key, value in {**said, "adapter.lora.alpha": float(alpha)}.items():
        writer.add(key, value)
    of_made = "F32", "F32"
    for name, low in adapter.ranks.items():
        rest = low.factor * low.rank / alpha
        types = peft.types.get(name, of_made) if peft else of_made
        if name == EMBEDDINGS:
            low = transposed(low)
            types = types[::-1]
        first = np.ascontiguousarray(low.a().T) if name == EMBEDDINGS else low.a()
        a, b = (by_name(own) if fmt is None else fmt for own in types)
        writer.add_tensor(f"{name}.lora_a", first.shape, a, a.quantize_rows(first))
        writer.add_tensor(
            f"{name}.lora_b", low.b_shape, b, b.quantize_rows(low.b() * np.float32(rest))
        )
    writer.write()
    return target.stat().st_size


def _of_peft(peft: Peft, config: Config, *, pairs: bool) -> Adapter:
    """Return the adapter of a PEFT folder. ``pairs``: the model has the rows of RoPE pairs side by
    side, as GGUF files do, so B's rows are reordered.
    """
    ranks = {}
    turned = ARCHS[config.arch.name].rope == "norm" and pairs
    if turned and peft.paired and config.arch.rope != ARCHS[config.arch.name].rope:
        what = "the adapter's RoPE row order does not match an M-RoPE GGUF file"
        raise UnsupportedError(f"{peft.path}: {what}: apply it to the Hugging Face folder")
    for name, low in peft.ranks.items():
        heads = _heads(name, config) if turned and not peft.paired else 0
        b = partial(_to_pairs, low.b, heads, _share(name, config)) if heads else low.b
        ranks[name] = replace(low, b=b)
    return Adapter(peft.path.resolve().name, peft.path, ranks, peft.mark)


def _to_pairs(read: Callable[[], Floats], heads: int, share: float) -> Floats:
    return halves_to_pairs(read(), heads, share)


def _share(name: str, config: Config) -> float:
    """Return the fraction of each head that RoPE rotates in the layer of the matrix ``name``; 1 if
    the layer has no RoPE.
    """
    layer = config.layers[int(name.split(".")[1])]
    return 1.0 if layer.rope is None else config.ropes[layer.rope].dims / layer.head_dim


def _heads(name: str, config: Config) -> int:
    """Return the number of heads of a matrix whose rows RoPE rotates (q or k); 0 for all others."""
    if not name.endswith(TURNED) or config.arch.name not in ARCHS:
        return 0
    if ARCHS[config.arch.name].rope != "norm":
        return 0
    number = name.split(".")[1]
    if not number.isdecimal() or int(number) >= len(config.layers):
        return 0  # reported later as no tensor of the model
    layer = config.layers[int(number)]
    return layer.n_head if name.endswith(TURNED[0]) else layer.n_head_kv


def _pairs_to_halves(tensor: Tensor, n_head: int, share: float) -> Floats:
    """Reorder the rows of B (``tensor``, with ``n_head`` heads) from GGUF's adjacent RoPE pairs to
    halves of a head, for a model run in place; only within the rotated ``share`` of each head.
    """
    rows = _floats(tensor)
    heads = rows.reshape(n_head, -1, rows.shape[1])
    n = round(heads.shape[1] * share)
    halves = heads[:, :n].reshape(n_head, -1, 2, rows.shape[1]).swapaxes(1, 2)
    found = np.concatenate([halves.reshape(n_head, n, -1), heads[:, n:]], 1)
    return np.ascontiguousarray(found).reshape(rows.shape)


def _floats(tensor: Tensor) -> Floats:
    values = tensor.dequantize()
    if not np.isfinite(values).all():
        raise tensor.error("holds a value that is not a finite number")
    return values


def _transposed(tensor: Tensor) -> Floats:
    return _floats(tensor).T


def _mark(tensors: Mapping[str, Tensor], alpha: object) -> bytes:
    state = hashlib.sha256(repr(alpha).encode())
    for name, tensor in tensors.items():
        state.update(repr((name, tensor.shape, tensor.ggml_type)).encode())
        state.update(tensor.data.tobytes())
    return state.digest()


def _checked(adapter: Adapter, gguf: GGUF, config: Config) -> Adapter:
    """Return the adapter mapped to the model's matrices, and checked against them. Raises
    FileError, UnsupportedError.
    """
    result = match_matrices(adapter, gguf, config, partial(_check_shapes, adapter))
    for name, low in result.ranks.items():
        _check(result, name, low, gguf)
    return result


def _check(adapter: Adapter, name: str, low: LowRank, gguf: GGUF) -> None:
    """Raise FileError or UnsupportedError unless ``low``, A and B of ``adapter``, fits the model's
    matrix ``name``.
    """
    where = f"{adapter.path}: {name}"
    if name in REFUSED or name.startswith("cls"):
        what = REFUSED.get(name, "a classifier")
        raise UnsupportedError(f"{where}: an adapter of {what}, which is not supported")
    if name not in gguf.tensors:
        raise FileError("is not a tensor of the model", path=adapter.path, where=name)
    shape = gguf.tensors[name].shape
    if len(shape) == 3 and not name.endswith("exps.weight"):
        raise UnsupportedError(f"{where}: an adapter of per-head matrices, which is not supported")
    if len(shape) not in (2, 3):
        raise UnsupportedError(f"{where}: an adapter of a vector, which is not supported")
    _check_shapes(adapter, name, low, shape)


def _check_shapes(adapter: Adapter, name: str, low: LowRank, shape: tuple[int, ...]) -> None:
    (*each, m, k), rank = shape, low.rank
    fits = rank > 0 and low.a_shape == (*each, rank, k) and low.b_shape == (*each, m, rank)
    if not fits:
        found = f"shapes {list(low.a_shape)} and {list(low.b_shape)}"
        n = "".join(f"{n}, " for n in each)
        expected = f"[{n}rank, {k}] and [{n}{m}, rank], for a matrix of shape {list(shape)}"
        if name in (EMBEDDINGS, TYPES):  # adapters may have these transposed
            expected = f"one rank for {m} rows of {k} values"
        raise FileError(found, path=adapter.path, where=name, expected=expected)
