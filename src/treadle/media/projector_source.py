"""The picture and sound parts of a Hugging Face folder as the source of a conversion to a projector
file.

Names, shapes and row order are those of llama.cpp's converter. Matrices get one format; vectors,
tables of positions and patch embeddings are F32. Unlike that converter, this one also writes bounds
of a picture's size, and keys for settings that llama.cpp fixes (``llamacpp_projectors.py``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treadle.convert.hf.row_order import halves_to_pairs
from treadle.convert.hf.tokenizer.special_tokens import added_tokens
from treadle.convert.recipe import is_matrix
from treadle.convert.sources.source import F32, Bytes, Source, SourceTensor
from treadle.errors import FileError
from treadle.files.safetensors import open_safetensors, read_json
from treadle.formats import FORMATS, by_name
from treadle.media.families.pixtral import BREAK, HALVES
from treadle.media.families.qwen_vl import DEEPSTACK
from treadle.media.hf_projector import DTYPES, HfProjector
from treadle.media.llamacpp_projectors import projector_differences
from treadle.media.projector import open_projector_file
from treadle.media.unsupported import UNSUPPORTED_PROJECTORS
from treadle.models.towers.bounds import bounded_stem

if TYPE_CHECKING:
    from treadle.files.tensor import Tensor
    from treadle.formats import Format

FUSED = ".attn_qkv."
ROTATED = (".attn_q.", ".attn_k.")
OWN_KEYS = (f"clip.{DEEPSTACK}", f"clip.vision.{HALVES}")  # true of a folder's tensors alone
COLOURS = (".image_mean", ".image_std")  # written as F32
# Names in folders' tables, and in files of a projector type.
RENAMED: Mapping[str, Mapping[str, str]] = {"mlp": {"mm.1.": "mm.0."}}
# Embeddings of the decoder without which llama.cpp does not open a file: its name, and the token.
TOKEN_ROWS: Mapping[str, tuple[str, str]] = {"pixtral": ("v.token_embd.img_break", BREAK)}
TOKENIZER = "tokenizer.json"
EMBEDDINGS = "embed_tokens.weight"  # the end of its name in all folders


def open_projector_source(path: str | os.PathLike[str], matrices: Format) -> Source:
    """Open the picture and sound parts of a Hugging Face folder for a converter.

    matrices: the format of the written matrices: F32, F16 or BF16. Raises FileError for damaged
    files or a folder without such parts, UnsupportedError for families that treadle does not
    support.
    """
    folder = open_projector_file(path)
    if not isinstance(folder, HfProjector):
        folder.close()
        raise FileError("is not a folder", path=path, expected="a Hugging Face folder")
    try:
        if not folder.tensors:
            raise FileError("has no tensors of a picture or sound part", path=folder.path)
        return projector_source(folder, matrices)
    except BaseException:
        folder.close()
        raise


def projector_source(folder: HfProjector, matrices: Format) -> Source:
    """Return an open folder's parts as a conversion source, which closes the folder when it is
    closed. ``matrices``: the format of the written matrices.
    """
    metadata = {
        "general.architecture": "clip",
        "general.type": "mmproj",
        "general.name": Path(folder.path).resolve().name,
    }
    for key, value in folder.metadata.items():
        if key not in OWN_KEYS:
            metadata[key] = _typed(key, value)
    n_head = 0
    if folder.metadata.get(f"clip.vision.{HALVES}"):
        n_head = int(folder.metadata["clip.vision.attention.head_count"])  # type: ignore[arg-type]
    names = RENAMED.get(str(metadata.get("clip.projector_type")), {})
    tensors = {}
    for tensor in folder.tensors.values():
        if bounded_stem(tensor.name) and np.isinf(tensor.dequantize()).all():
            continue  # infinite bounds are not written: a missing bound means no clamping
        for part in _parts(tensor, folder):
            made = _source_tensor(part, n_head, matrices)
            first = next((old for old in names if made.name.startswith(old)), "")
            if first:
                made = replace(made, name=names[first] + made.name.removeprefix(first))
            tensors[made.name] = made
    notes = [
        f"the {modality} part ({kind}) is left out: {UNSUPPORTED_PROJECTORS[kind]}"
        for modality, kind in folder.left_out.items()
    ]
    notes += projector_differences(metadata, tensors)
    kind = str(metadata.get("clip.projector_type"))
    if kind in TOKEN_ROWS:
        name, token = TOKEN_ROWS[kind]
        row = _token_row(folder, name, token)
        if row is None:
            notes.append(f"llama.cpp will not open this file: the folder has no token {token}")
        else:
            tensors[name] = _source_tensor(row, 0, matrices)
    return Source(folder.path, metadata, tensors, [folder], notes)


def _typed(key: str, value: Any) -> Any:
    """Return the value of ``key`` with the type that it has in projector files: F32 for the mean
    and deviation of colours; other values are returned unchanged.
    """
    return np.asarray(value, np.float32) if key.endswith(COLOURS) else value


def _parts(tensor: Tensor, folder: HfProjector) -> Iterator[Tensor]:
    """Yield the tensors to write for a folder's tensor: itself, or queries, keys and values if
    projector files have them as three.
    """
    if not folder.table.splits_qkv or FUSED not in tensor.name:
        yield tensor
        return
    n, *columns = tensor.shape
    if n % 3:
        raise tensor.error(f"shape {list(tensor.shape)}", "queries, keys and values of one height")
    size = tensor.n_bytes // 3
    for i, kind in enumerate("qkv"):
        yield replace(
            tensor,
            name=tensor.name.replace(FUSED, f".attn_{kind}."),
            shape=(n // 3, *columns),
            n_bytes=size,
            offset=tensor.offset + i * size,
        )


def _source_tensor(tensor: Tensor, n_head: int, matrices: Format) -> SourceTensor:
    """Return a tensor as the converter writes it, matrices in the format ``matrices``. ``n_head``:
    number of heads of queries and keys, whose rows are reordered so that rotated pairs are
    adjacent; 0: no reordering.
    """
    turned = n_head > 0 and any(part in tensor.name for part in ROTATED)
    if turned and tensor.shape[0] % (2 * n_head):
        raise tensor.error(f"shape {list(tensor.shape)}", f"{n_head} heads of an even height")
    read = partial(_in_pairs, tensor, n_head) if turned else partial(_bytes, tensor)
    made = SourceTensor(
        tensor.name,
        tensor.shape,
        tensor.ggml_type,
        read,
        f"{tensor.path}: {tensor.name}",
        (tensor,) if tensor.offset else (),  # a tensor made in memory is not in its path
    )
    return replace(made, written=(matrices if is_matrix(made) else F32).ggml_id)


def _token_row(folder: HfProjector, name: str, token: str) -> Tensor | None:
    """Return the decoder's embedding of the added token whose text is ``token``, as an F32 tensor
    called ``name`` of the projector file; None if the folder has no such token, or no embeddings in
    floats.
    """
    path = Path(folder.path)
    tokenizer = path / TOKENIZER
    added = added_tokens(read_json(tokenizer), tokenizer) if tokenizer.exists() else {}
    index = next((i for i, each in added.items() if each.text == token), None)
    if index is None:
        return None
    with closing(open_safetensors(path)) as weights:
        tables = [t for t in weights.tensors.values() if t.name.endswith(EMBEDDINGS)]
        if len(tables) != 1 or tables[0].dtype not in DTYPES:
            return None
        (table,) = tables
        if len(table.shape) != 2 or index >= table.shape[0]:
            raise table.error(f"shape {list(table.shape)}", f"a row {index}, that of {token}")
        rows = table.data.reshape(table.shape[0], -1)
        values = FORMATS[DTYPES[table.dtype]].dequantize_rows(rows[index])
    like = next(iter(folder.tensors.values()))
    return like.in_memory(name, values.shape, by_name("F32"), values.view(np.uint8))


def _bytes(tensor: Tensor) -> Bytes:
    return tensor.data


def _in_pairs(tensor: Tensor, n_head: int) -> Bytes:
    """Return the bytes of a matrix of queries or keys with the rows of the two halves of each head
    interleaved.
    """
    rows = tensor.data.reshape(tensor.shape[0], -1)
    made: Bytes = halves_to_pairs(rows, n_head).reshape(-1)
    return made
