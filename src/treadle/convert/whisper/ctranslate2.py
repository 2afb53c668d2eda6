"""CTranslate2's ``model.bin`` of Whisper, which faster-whisper reads, with the files beside it.

::

    version:u32 spec:string revision:u32 n:u32
    n x {name:string rank:u8 dims:u32[rank] type:u8 n_bytes:u32 data}          versions 4 to 6
    n:u32, n x {alias:string name:string}                                      version 3 and later
    string: length:u16 bytes, the last of which is NUL

An int8 matrix has a factor for each of its rows: the weights were multiplied by it before rounding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.convert.hf.tokenizer.tokenizer import JSON
from treadle.convert.whisper.file import (
    MERGES,
    WhisperFile,
    WhisperSizes,
    list_keys,
    maps_of,
    model_keys,
    read_keys,
    vocabulary_keys,
)
from treadle.convert.whisper.names import ARCH, CT2
from treadle.convert.whisper.vocabulary import bytes_of, merges_of
from treadle.errors import FileError, UnsupportedError
from treadle.files.metadata import SIZE_MAX
from treadle.files.reader import FileReader
from treadle.files.safetensors import read_json
from treadle.files.tensor import Bytes, MadeTensor, Tensor
from treadle.formats import FORMATS, by_name

MODEL = "model.bin"
SPEC = "WhisperSpec"
VERSIONS = range(4, 7)
VOCABULARIES = "vocabulary.json", "vocabulary.txt"
ITEM_BYTES = 4, 1, 2, 4, 2, 2  # by type: f32, i8, i16, i32, f16, bf16
GGML_TYPES = {0: 0, 4: 1, 5: 30}  # those that are read as they are
INT8 = 1
MAX_DIMS = 8
MAX_NAME = 1024
_LAYER = re.compile(r"/layer_(\d+)/")
SUFFIXES = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


@dataclass(frozen=True)
class Ct2Variable:
    """One array of a file; ``kind`` is CTranslate2's type number, ``offset`` the byte of
    its data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    n_bytes: int
    offset: int


def is_ctranslate2(head: bytes) -> bool:
    """Return whether ``head``, a file's first bytes, is that of CTranslate2's model of Whisper."""
    return len(head) > 4 and head[6:].startswith(SPEC.encode() + b"\0")


class Ct2File(FileReader):
    """One file: its arrays (``Ct2Variable``) by name, aliases included. Raises FileError if
    damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "a model of CTranslate2")
        version = self.uint("version")
        spec = self._string("spec") if version in VERSIONS else ""
        if version not in VERSIONS:
            have = f"{VERSIONS[0]} to {VERSIONS[-1]}"
            raise UnsupportedError(f"{path}: version {version} of CTranslate2's files: {have}")
        if spec != SPEC:
            raise UnsupportedError(f"{path}: {spec!r:.60} of CTranslate2: expected {SPEC}")
        self.uint("revision")
        self.variables: dict[str, Ct2Variable] = {}
        for _ in range(self.count("variables", 12, 4)):
            self._read_variable()
        for _ in range(self.count("aliases", 4, 4)):
            alias, name = self._string("alias"), self._string("alias")
            if name not in self.variables:
                raise self.error(f"is an alias of {name!r:.60}, which is missing", where=alias)
            self.variables[alias] = self.variables[name]

    def _string(self, where: str) -> str:
        at = self.at
        n = self.uint(where, 2)
        text = self.text(n, where, at) if 0 < n <= MAX_NAME else ""
        if not text.endswith("\0") or not text[:-1].isprintable():
            raise self.error(f"a name of {n} bytes: {text[:60]!r}", at, where, "a name")
        return text[:-1]

    def _read_variable(self) -> None:
        at = self.at
        name = self._string("variable")
        rank = self.uint(name, 1)
        if rank > MAX_DIMS:
            raise self.error(f"{rank} dimensions", at, name, f"at most {MAX_DIMS}")
        shape = tuple(self.uint(name) for _ in range(rank))
        kind, n_bytes = self.uint(name, 1), self.uint(name)
        if kind >= len(ITEM_BYTES) or n_bytes != math.prod(shape) * ITEM_BYTES[kind]:
            raise self.error(f"shape {list(shape)} of type {kind} in {n_bytes} bytes", at, name)
        self.check_inside(self.at, n_bytes, name)
        self.variables[name] = Ct2Variable(name, shape, kind, n_bytes, self.at)
        self.at += n_bytes

    def scalar(self, name: str) -> int:
        """Return the value of an integer variable with one element. Raises FileError for others."""
        found = self.variables.get(name)
        if found is None or math.prod(found.shape) != 1 or found.kind not in (1, 2, 3):
            raise self.error("is missing, or no whole number", len(self.file), name)
        raw = self.file[found.offset : found.offset + found.n_bytes]
        return int(raw.view(f"<i{found.n_bytes}")[0])


def open_ctranslate2(path: Path) -> WhisperFile:
    """Open ``model.bin``, or its folder, in place; int8 matrices become Q8_0 in memory when they
    are read. Raises FileError for damaged or missing files.
    """
    file = Ct2File(path / MODEL if path.is_dir() else path)
    try:
        tensors = _tensors(file)
        folder = file.path.parent
        sizes = _sizes(file, tensors)
        keys = model_keys(file.path, tensors, sizes)
        keys["general.name"] = folder.resolve().name
        n_vocab = int(keys[f"{ARCH}.vocab_size"])
        vocabulary, texts = _vocabulary(folder, n_vocab)
        keys |= vocabulary | _lists(folder)
    except BaseException:
        file.close()
        raise
    return WhisperFile(file.path, keys, tensors, maps_of([file.map]), partial(_merges, texts))


def _sizes(file: Ct2File, tensors: Mapping[str, Tensor]) -> WhisperSizes:
    def layers(side: str) -> int:
        numbers = {int(name.split(".")[2]) for name in tensors if name.startswith(f"{side}.blk.")}
        return max(numbers, default=-1) + 1

    heads = [file.scalar(f"{side}/num_heads") for side in ("encoder", "decoder")]
    for side, n in zip(("encoder", "decoder"), heads, strict=True):
        if not 1 <= n <= SIZE_MAX:
            raise file.error(f"is {n}", where=f"{side}/num_heads", expected="a number of heads")
    return WhisperSizes(layers("enc"), layers("dec"), *heads)


def _tensors(file: Ct2File) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, variable in file.variables.items():
        stem, _, last = _LAYER.sub(r"/layer.\1/", name).replace("/", ".").rpartition(".")
        if last == "encodings":
            last = "weight"
        elif last not in SUFFIXES:
            continue  # factors of the numbers, and settings
        ours = CT2.name_of(stem)
        if not ours:
            if variable.name != name or stem == "decoder.projection":  # a copy of the embeddings
                continue
            raise file.error("is no tensor of a Whisper model", variable.offset, name)
        found |= _named(file, variable, ours.split(), SUFFIXES[last])
    return found


def _named(
    file: Ct2File, variable: Ct2Variable, ours: Sequence[str], suffix: str
) -> dict[str, Tensor]:
    """Return a variable as tensors by treadle's name. ``ours``: the names between which its rows
    are split equally, without ``suffix`` ("weight" or "bias"); after the first only last words.
    Biases of keys are left out: Whisper has none, and the file has zeros.
    """
    prefix = ours[0].rpartition(".")[0]
    names = [ours[0], *(f"{prefix}.{name}" for name in ours[1:])]
    if not variable.shape or variable.shape[0] % len(names):
        what = f"shape {list(variable.shape)}"
        raise file.error(what, variable.offset, variable.name, f"rows of {len(names)} matrices")
    rows = variable.shape[0] // len(names)
    shape = (rows, *variable.shape[1:])
    found = {}
    for i, stem in enumerate(names):
        name = f"{stem}.{suffix}"
        if suffix == "bias" and stem.endswith("attn_k"):
            continue  # zeros: Whisper's keys have none
        if variable.kind == INT8:
            found[name] = _codes(file, variable, name, shape, i * rows)
            continue
        if variable.kind not in GGML_TYPES:
            what = f"{variable.name}: numbers of type {variable.kind}"
            raise UnsupportedError(
                f"{file.path}: {what}: float32, float16, bfloat16 and int8 are read"
            )
        kind = GGML_TYPES[variable.kind]
        n_bytes = variable.n_bytes // len(names)
        place = file.path, variable.offset + i * n_bytes, file.file
        found[name] = Tensor(name, shape, kind, FORMATS[kind], n_bytes, *place)
    return found


def _codes(
    file: Ct2File, variable: Ct2Variable, name: str, shape: tuple[int, ...], first: int
) -> Tensor:
    """Return the tensor ``name`` of ``shape``: the rows of an int8 variable from row ``first`` on,
    as Q8_0; as F16 if rows are not whole blocks, or for a convolution.
    """
    factors = file.variables.get(f"{variable.name}_scale")
    if factors is None or factors.kind != 0 or math.prod(factors.shape) != variable.shape[0]:
        what = "has no factor for each row"
        raise file.error(what, variable.offset, variable.name, f"{variable.name}_scale")
    n_rows, k = shape[0], math.prod(shape[1:])
    blocks = len(shape) == 2 and k % 32 == 0
    fmt = by_name("Q8_0" if blocks else "F16")
    n_bytes = n_rows * fmt.row_bytes(k)
    at = variable.offset + first * k
    scales = factors.offset + 4 * first

    def make() -> Bytes:
        codes = file_bytes[at : at + n_rows * k].view(np.int8).reshape(n_rows, k)
        by = file_bytes[scales : scales + 4 * n_rows].view("<f4")
        steps = (1.0 / by.astype(np.float64))[:, None]
        if not blocks:
            return np.asarray((codes * steps).astype("<f2")).reshape(-1).view(np.uint8)
        made = np.empty((n_rows, k // 32), [("d", "<f2"), ("q", "i1", 32)])
        made["d"] = steps
        made["q"] = codes.reshape(n_rows, k // 32, 32)
        return made.reshape(-1).view(np.uint8)

    file_bytes = file.file
    place = file.path, at, file_bytes
    return MadeTensor(name, shape, fmt.ggml_id, fmt, n_bytes, *place, make)


def _vocabulary(folder: Path, n_vocab: int) -> tuple[dict[str, Any], list[str]]:
    """Return the tokenizer's keys, and the text tokens from which merges are to be computed: [] if
    a file has the merges. Raises FileError without a vocabulary.
    """
    texts: list[str] = []
    for name in VOCABULARIES:
        if (folder / name).is_file():
            texts = _read_vocabulary(folder / name)
            break
    if (folder / JSON).is_file():
        keys = read_keys(folder, {"model_type": ARCH}, n_vocab)
        if MERGES in keys:
            return keys, []
    if not texts:
        expected = f"{JSON}, or one of {', '.join(VOCABULARIES)}"
        raise FileError("is a folder without a vocabulary", path=folder, expected=expected)
    return vocabulary_keys(texts, n_vocab), texts


def _read_vocabulary(path: Path) -> list[str]:
    if path.suffix == ".json":
        import json

        from treadle.files.reader import read_head
        from treadle.files.safetensors import MAX_JSON

        try:
            found = json.loads(read_head(path, MAX_JSON, "a vocabulary"))
        except (ValueError, RecursionError):
            found = None
    else:
        found = path.read_text("utf-8", "replace").splitlines()
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise FileError("is no list of tokens", path=path)
    return found


def _merges(texts: Sequence[str]) -> list[str]:
    """Return the merges that make the text tokens, which are those before ``<|endoftext|>``."""
    n = next((i for i, text in enumerate(texts) if text == "<|endoftext|>"), len(texts))
    return merges_of([bytes_of(text) for text in texts[:n]])


def _lists(folder: Path) -> dict[str, Any]:
    """Return the keys of suppressed tokens and of alignment heads, from config.json in ``folder``;
    {} if it has none.
    """
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}

    def ids(key: str) -> list[int]:
        found = config.get(key)
        listed = found if isinstance(found, list) else []
        return [each for each in listed if isinstance(each, int) and each >= 0]

    given = config.get("alignment_heads")
    heads = [
        (each[0], each[1])
        for each in (given if isinstance(given, list) else [])
        if isinstance(each, list) and len(each) == 2 and all(isinstance(n, int) for n in each)
    ]
    return list_keys(ids("suppress_ids"), ids("suppress_ids_begin"), heads)


__all__ = ["is_ctranslate2", "open_ctranslate2"]
