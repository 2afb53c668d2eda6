"""Hugging Face directories: config.json, tokenizer files, and weights in safetensors.

``open_hf`` opens one for the engine, in place: weights stay in the mapped files, whatever their
size. ``open_hf_source`` opens one for a converter that writes GGUF.

GGUF's llama rotates adjacent elements of a head (2i, 2i + 1), transformers (i, i + d/2), so a
converter reorders the rows of q and k. A model run in place keeps its rows and records the rotation
in ``treadle.rope``.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.config import HfConfig, adapt_to_mlx, read_config
from treadle.convert.hf.dense_modules import read_dense
from treadle.convert.hf.drafters import Tables, with_usual_names
from treadle.convert.hf.families.multimodal import TEXT_APART, TEXT_WEIGHTS
from treadle.convert.hf.in_memory import AssembledTensors
from treadle.convert.hf.mlx_names import as_transformers
from treadle.convert.hf.pooling import read_pooling
from treadle.convert.hf.row_order import IN_PLACE, rope_row_order
from treadle.convert.hf.scalar_tensors import take_numbers
from treadle.convert.hf.sentence_transformers import read_query, read_sentences
from treadle.convert.hf.tensors import (
    EMBEDDINGS,
    GGML_TYPE,
    SMALL,
    MappedTensor,
    check_named,
    count_other_parts,
    mtp_tensors,
    name_tensors,
    renamed,
    tasks_left_out,
    without_copy,
)
from treadle.convert.hf.tokenizer.special_tokens import GENERATION, read_optional
from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer
from treadle.convert.quantized.checkpoint import find_settings, unquantised
from treadle.convert.quantized.dequantized_tensor import MULTIPLIED_OUT, DequantizedTensor
from treadle.convert.quantized.mlx import PackedModule
from treadle.convert.sources.derived_tensors import stored
from treadle.convert.sources.source import (
    FILE_TYPES,
    PARTS_LEFT_OUT,
    Bytes,
    Source,
    SourceTensor,
    f32_bytes,
    f32_tensor,
)
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF
from treadle.files.hf_drafters import dspark_config, has_dspark, stage_name
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import (
    SafeTensor,
    SafeTensors,
    find_weights,
    open_safetensors,
    read_json,
)
from treadle.files.splits import CONFIG
from treadle.files.tensor import PartedTensor, Progress, Tensor
from treadle.formats import FORMATS
from treadle.models.archs import ARCHS
from treadle.models.drafters.target import I64
from treadle.models.graphs.nextn import HEAD, OUTPUT_MIX, SHARED
from treadle.models.load import ROPE_KEY
from treadle.models.rope import DYNAMIC
from treadle.models.structure import layer_of
from treadle.sampling.settings import read_generation_config

_F32 = GGML_TYPE["F32"]


@dataclass
class HfFolder:
    """An opened and checked Hugging Face directory, from which ``open_hf`` makes a model to run and
    ``open_hf_source`` a source to convert.
    """

    path: Path  # the directory
    hyper: HfConfig
    weights: SafeTensors
    tensors: dict[str, MappedTensor]  # by GGUF name
    metadata: dict[str, Any]
    mtp_problem: str = ""  # why the MTP layers are left out
    metadata_without_mtp: dict[str, Any] = field(default_factory=dict)
    tables: Tables = field(default_factory=dict)  # of integers, by GGUF name


def open_hf(path: str | os.PathLike[str], *, drafter: bool = False) -> HFModel:
    """Open a Hugging Face directory to run in place.

    ``path`` is the directory, or its weight file or index. ``drafter``: if the folder holds both a
    DeepSeek V4 model and its DSpark drafter, open the drafter. Raises FileError for damaged,
    missing or contradictory files, and UnsupportedError for an unsupported model or tokenizer.
    """
    checkpoint = read_checkpoint(path, drafter=drafter)
    if said := tasks_left_out(checkpoint.weights):
        logging.getLogger("treadle").warning("%s: %s", checkpoint.path, said)
    if checkpoint.mtp_problem and ARCHS[checkpoint.hyper.family.arch].nextn:
        warnings.warn(checkpoint.mtp_problem, stacklevel=2)
    return HFModel(checkpoint)


def read_checkpoint(path: str | os.PathLike[str], *, drafter: bool = False) -> HfFolder:
    """Open and check a directory; ``path``, ``drafter`` and errors are those of ``open_hf``."""
    given = Path(os.path.expanduser(path))
    folder = given if given.is_dir() else given.parent
    config = read_json(folder / CONFIG)
    place = given if given != folder else _weights_of(folder)
    # Other models are refused by their config before any weights are opened.
    takes_dspark = drafter and has_dspark(config)
    has_text_apart = str(config.get("model_type")) in TEXT_APART
    weights = open_safetensors(place) if takes_dspark or has_text_apart else None
    try:
        if weights is not None and takes_dspark:
            config = _take_dspark(config, weights)
        elif weights is not None:
            _check_text(config, folder, weights)
        hyper = read_config(config, folder / CONFIG)
        weights = weights or open_safetensors(place)
        if settings := find_settings(MetadataReader(config, folder / CONFIG), folder):
            weights.tensors = unquantised(weights.tensors, settings)
        weights.tensors, laid = as_transformers(weights.tensors)
        if laid:
            hyper = adapt_to_mlx(hyper, folder)
        tables: Tables = {}
        if hyper.family.drafts:
            weights.tensors, tables = with_usual_names(weights.tensors)
        if (in_layers := hyper.in_layers) is not None:
            named = (replace(t, name=in_layers(n)) for n, t in weights.tensors.items())
            weights.tensors = {tensor.name: tensor for tensor in named}
        numbers = take_numbers(weights, hyper)
        tensors = name_tensors(weights, hyper)
        metadata = {**hyper.metadata, **numbers, "general.name": folder.resolve().name}
        metadata |= {"general.type": "model"}
        most = tensors.get(EMBEDDINGS) or next(iter(tensors.values()))
        kind = most.tensor.dtype
        if kind in FILE_TYPES:
            metadata["general.file_type"] = FILE_TYPES[kind]
        metadata |= read_generation_config(read_optional(folder / GENERATION))
        metadata |= read_pooling(folder, config, hyper)
        metadata |= read_query(folder, hyper) if hyper.scores else read_sentences(folder)
        metadata |= read_tokenizer(folder, config, hyper.sizes["n_vocab"])
        checkpoint = HfFolder(folder, hyper, weights, tensors, metadata, tables=tables)
        dense, keys = ({}, {}) if hyper.scores else read_dense(folder, hyper, weights)
        metadata |= keys
        checkpoint.tensors = check_named(weights, hyper, tensors, _Outline(checkpoint)) | dense
        if types := checkpoint.tensors.get("token_types.weight"):  # llama.cpp requires this key
            metadata["tokenizer.ggml.token_type_count"] = types.shape[0]
        if further := mtp_tensors(weights, hyper):
            checkpoint = _with_mtp(checkpoint, further)
    except BaseException:
        if weights is not None:
            weights.close()
        raise
    return checkpoint


def _with_mtp(checkpoint: HfFolder, further: Mapping[str, SafeTensor]) -> HfFolder:
    """Return the folder ``checkpoint`` with its MTP layers, the tensors ``further``, added. If
    these are incomplete or unsupported, return it without them, with the reason in ``mtp_problem``.
    """
    from treadle.convert.hf.mtp import check_mtp, mtp_keys, name_mtp

    try:
        found = name_mtp(further, checkpoint.hyper)
        result = replace(
            checkpoint,
            tensors=checkpoint.tensors | found,
            metadata=checkpoint.metadata | mtp_keys(found, checkpoint.hyper),
            metadata_without_mtp=checkpoint.metadata,
        )
        check_mtp(_Outline(result), result.hyper)
        names = ARCHS[result.hyper.family.arch].names
        found = dict(renamed(name, named, names) for name, named in found.items())
        result.tensors = checkpoint.tensors | found
    except (FileError, UnsupportedError) as error:
        return replace(checkpoint, mtp_problem=f"MTP layers are left out: {error}")
    return result


def _take_dspark(config: Mapping[str, Any], weights: SafeTensors) -> dict[str, Any]:
    """Return the config of the DSpark in a DeepSeek V4 folder, and leave only its tensors in
    ``weights``.
    """
    taken = dict(dspark_config(config, weights.tensors))
    weights.tensors = {
        at: replace(tensor, name=at)
        for name, tensor in weights.tensors.items()
        if (at := stage_name(name))
    }
    return taken


def _check_text(config: Mapping[str, Any], folder: Path, weights: SafeTensors) -> None:
    """Raise UnsupportedError if a multimodal folder has no weights of its text model, because these
    were published in another repository.
    """
    if any(name.startswith(TEXT_WEIGHTS) for name in weights.tensors):
        return
    kind = config["model_type"]
    key = TEXT_APART[kind]
    part = config.get("text_config")
    inner = part.get("_name_or_path") if isinstance(part, dict) else None
    found = config.get(key) or inner
    which = f"they are those of {found}" if isinstance(found, str) else f"{key} does not name them"
    what = f"has no weights of its text model ({which})"
    raise UnsupportedError(
        f"{folder}: {kind} {what}: load that model, and name this folder as its projector "
        "(--mmproj, mmproj=)"
    )


def _weights_of(folder: Path) -> Path:
    found = find_weights(folder)
    if found is not None:
        return found
    others = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pth", ".pt"))
    if others:
        raise UnsupportedError(
            f"{folder}: weights in {others[0]}, a format that can run code when loaded: save "
            "the model as safetensors"
        )
    raise FileError("is a folder without weights", path=folder, expected="safetensors files")


class HFModel(GGUF):
    """A Hugging Face directory with the interface of a GGUF file: GGUF's keys, and tensors in the
    mapped files.

    In memory are only norms that GGUF stores 1 larger, RoPE factors, tables of token ids, tensors
    whose rows or axes GGUF has in another order, and tensors derived from others.
    """

    def __init__(self, checkpoint: HfFolder) -> None:
        """Take over the checkpoint's files: closing the model closes them."""
        hyper = checkpoint.hyper
        weights = checkpoint.weights
        self.path = checkpoint.path
        self.paths = weights.paths
        self.version = 3
        self.alignment = 1
        self.header_only = False
        self.n_bytes = weights.n_bytes
        self.metadata = dict(checkpoint.metadata)
        if not hyper.family.paired and ARCHS[hyper.family.arch].rope != "none":
            self.metadata[ROPE_KEY] = IN_PLACE
        self.types = {}
        self.tensors = {}
        self._workshop = workshop = AssembledTensors(checkpoint.path, checkpoint.tensors)
        for name, named in checkpoint.tensors.items():
            if _shift(named, hyper):
                data = f32_bytes(named.floats(_shift(named, hyper)))
                path = named.tensor.path
                self.tensors[name] = _in_memory(name, named.shape, _F32, data, path)
            elif name in workshop.tensors:
                self.tensors[name] = workshop.tensor(named)
            else:
                self.tensors[name] = _in_place(named)
        for name, values in hyper.factors.items():
            self.tensors[name] = _from_config(name, values, checkpoint)
        for name, table in checkpoint.tables.items():
            self.tensors[name] = _table(name, table, checkpoint)
        self._maps = weights.maps

    def make(self, progress: Progress) -> None:
        """Assemble all derived tensors in memory now. ``progress("unpack", done, total)`` counts
        tensors. Raises FileError for damaged parts.
        """
        self._workshop.make(progress)


class _Outline(GGUF):
    """A directory's keys and tensor shapes as a GGUF model without data, for the checks of the
    graph before weights are read.
    """

    def __init__(self, checkpoint: HfFolder) -> None:
        self.path = checkpoint.path
        self.metadata = checkpoint.metadata
        self.tensors = {name: _in_place(named) for name, named in checkpoint.tensors.items()}
        for name, values in checkpoint.hyper.factors.items():
            self.tensors[name] = _from_config(name, values, checkpoint)
        for name, table in checkpoint.tables.items():
            self.tensors[name] = _table(name, table, checkpoint)


def _in_place(named: MappedTensor) -> Tensor:
    tensor = named.tensor
    packed = named.packed
    if packed is not None:
        return PartedTensor(
            named.name,
            packed.shape,
            named.ggml_type,
            packed.format,
            packed.n_bytes,
            tensor.path,
            tensor.offset,
            tensor.file,
            tuple(array.data for array in packed.arrays),
        )
    return Tensor(
        named.name,
        named.shape,
        named.ggml_type,
        FORMATS.get(named.ggml_type),
        tensor.n_bytes,
        tensor.path,
        tensor.offset,
        tensor.file,
    )


def _from_config(name: str, values: npt.NDArray[np.float32], checkpoint: HfFolder) -> Tensor:
    return _in_memory(name, values.shape, _F32, f32_bytes(values), checkpoint.path / CONFIG)


def _table(name: str, values: npt.NDArray[np.int64], checkpoint: HfFolder) -> Tensor:
    return _in_memory(name, values.shape, I64, _integers(values), checkpoint.weights.path)


def _integers(values: npt.NDArray[np.int64]) -> Bytes:
    return np.ascontiguousarray(values, "<i8").view(np.uint8)


def _in_memory(
    name: str, shape: tuple[int, ...], ggml_type: int, data: Bytes, path: Path
) -> Tensor:
    data.flags.writeable = False
    return Tensor(name, shape, ggml_type, FORMATS.get(ggml_type), len(data), path, 0, data)


def _shift(named: MappedTensor, hyper: HfConfig) -> float:
    own = named.name.endswith("norm.weight") and not named.name.endswith(hyper.family.unshifted)
    return hyper.family.norm_shift if own else 0.0


def open_hf_source(path: str | os.PathLike[str], *, mtp: bool = False) -> Source:
    """Open a directory for a converter: GGUF's names and row order, and F32 for vectors.

    ``mtp``: only the layers for multi-token prediction; if the folder holds a DeepSeek V4 model and
    its DSpark drafter, only the drafter. Raises UnsupportedError if there are none, or if GGUF
    lacks the architecture; other errors are those of ``open_hf``.
    """
    checkpoint = read_checkpoint(path, drafter=mtp)
    try:
        apart = ""
        if not checkpoint.hyper.family.drafts:
            apart = _mtp_alone(checkpoint) if mtp else _without_mtp_heads(checkpoint)
    except UnsupportedError:
        checkpoint.weights.close()
        raise
    hyper = checkpoint.hyper
    if hyper.family.in_place:
        checkpoint.weights.close()
        what = "GGUF has no such architecture: it cannot be converted; run it from its folder"
        raise UnsupportedError(f"{checkpoint.path}: {hyper.family.arch}: {what}")
    named = without_copy(checkpoint.tensors) if hyper.tied else checkpoint.tensors
    tensors = {name: _source(each, hyper) for name, each in named.items()}
    for name, values in hyper.factors.items():
        tensors[name] = f32_tensor(name, values, f"{checkpoint.path / CONFIG}: rope_scaling")
    for name, table in checkpoint.tables.items():
        origin = f"{checkpoint.weights.path}: {name}"
        tensors[name] = SourceTensor(name, table.shape, I64, partial(_integers, table), origin)
    notes = _notes(named.values()) + _unpacked_notes(checkpoint.weights.tensors.values())
    notes += filter(None, (checkpoint.mtp_problem, apart, tasks_left_out(checkpoint.weights)))
    if n_others := count_other_parts(checkpoint.weights, hyper):
        notes.append(f"{PARTS_LEFT_OUT} ({n_others} tensors) are left out")
    if DYNAMIC in checkpoint.metadata:
        notes.append(
            "rope_type is 'dynamic': valid up to the model's context; beyond it llama.cpp's RoPE "
            "differs from transformers'"
        )
    return Source(checkpoint.path, checkpoint.metadata, tensors, [checkpoint.weights], notes)


def _without_mtp_heads(checkpoint: HfFolder) -> str:
    """Remove from ``checkpoint`` MTP layers that mix their streams with tensors of their own
    (DeepSeek V4): GGUF has no names for these beside the model's layers. Return a note for the
    user, "" if nothing was removed.
    """
    if not any(HEAD in name for name in checkpoint.tensors):
        return ""
    n_layer = checkpoint.hyper.n_layer
    checkpoint.tensors = {
        name: named for name, named in checkpoint.tensors.items() if layer_of(name)[0] < n_layer
    }
    checkpoint.metadata = checkpoint.metadata_without_mtp
    return "MTP layers are left out, as by llama.cpp's converter: --mtp writes a file of them alone"


def _mtp_alone(checkpoint: HfFolder) -> str:
    """Remove all layers of ``checkpoint`` but the MTP layers, as llama.cpp's converter does with
    ``--mtp``; the embeddings, the output and its norm stay. Return "", as there is no note for the
    user. Raises UnsupportedError if there are no MTP layers.
    """
    n_layer = checkpoint.hyper.n_layer
    found: dict[str, MappedTensor] = {}
    for name, named in checkpoint.tensors.items():
        i, stem = layer_of(name)
        if i >= n_layer:
            at = OUTPUT_MIX + stem.removeprefix(HEAD) if stem.startswith(HEAD) else name
            found[at] = replace(named, name=at)
        elif name in SHARED:
            found[name] = named
    if all(layer_of(name)[0] < 0 for name in found):
        why = checkpoint.mtp_problem or "its weights have none"
        raise UnsupportedError(f"{checkpoint.path}: no file of MTP layers can be written: {why}")
    checkpoint.tensors = found
    return ""


def _notes(tensors: Iterable[MappedTensor]) -> list[str]:
    """Return notes for the user on MLX formats of ``tensors`` that GGUF lacks."""
    kinds = {(p.format.name, p.scales.dtype) for named in tensors if (p := named.packed)}
    return [
        f"{name} weights have no GGUF format: they are dequantised and written as {kind}, the type "
        "of their scales, unless --type names another"
        for name, kind in sorted(kinds)
    ]


def _unpacked_notes(tensors: Iterable[SafeTensor]) -> list[str]:
    """Return notes for the user on quantised weights whose numbers fit no GGUF block format."""
    found = [each for each in tensors if isinstance(each, DequantizedTensor)]
    kinds = {(each.sources[0].dtype, each.dtype) for each in found if each.dtype in MULTIPLIED_OUT}
    return [
        f"quantised weights ({what}) are dequantised and written as {kind}, unless --type names "
        "another"
        for what, kind in sorted(kinds)
    ]


def _source(named: MappedTensor, hyper: HfConfig) -> SourceTensor:
    tensor = named.tensor
    turned = rope_row_order(layer_of(named.name)[1], named.shape, hyper)

    def as_stored() -> Bytes:
        rows = named.rows()
        if turned is None:
            return rows
        return turned(rows.reshape(*tensor.shape[:-1], -1)).reshape(-1)

    def vector() -> Bytes:
        values = named.floats(_shift(named, hyper))
        return f32_bytes(turned(values) if turned else values)

    def unpacked(packed: PackedModule) -> Bytes:
        """Return MLX's weights as numbers: GGUF has no such format."""
        blocks = packed.format.join([array.data for array in packed.arrays])
        rows = packed.format.dequantize_rows(blocks.reshape(math.prod(packed.shape[:-1]), -1))
        return f32_bytes(turned(rows) if turned else rows)

    packed = named.packed
    if packed is not None:
        kind = GGML_TYPE[packed.scales.dtype]
        read = partial(unpacked, packed)
        return SourceTensor(named.name, packed.shape, _F32, read, named.origin, packed.arrays, kind)
    if named.name in hyper.family.tables and (more := hyper.sizes["n_vocab"] - named.shape[0]) > 0:
        return _filled_up(named, more)
    is_vector = len(tensor.shape) == 1 or layer_of(named.name)[1] in SMALL
    return SourceTensor(
        named.name,
        named.shape,
        _F32 if is_vector else named.ggml_type,
        vector if is_vector else as_stored,
        named.origin,
        stored(tensor),
    )


def _filled_up(named: MappedTensor, more: int) -> SourceTensor:
    """Return the table ``named`` with its first row appended ``more`` times: llama.cpp requires a
    row for each token.
    """
    shape = (named.shape[0] + more, *named.shape[1:])

    def read() -> Bytes:
        rows = named.rows().reshape(named.shape[0], -1)
        return np.concatenate([rows, np.repeat(rows[:1], more, 0)]).reshape(-1)

    ranges = stored(named.tensor)
    return SourceTensor(named.name, shape, named.ggml_type, read, named.origin, ranges)
