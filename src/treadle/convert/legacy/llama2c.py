"""llama2.c checkpoints and their tokenizers.

Version 2 is quantised: int8 codes with a float32 scale per group of the flattened matrix. If groups
and rows are multiples of Q8_0's block, the matrix becomes Q8_0 with unchanged codes and scales
rounded to 16 bits; other matrices become F32.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from treadle.convert.hf.tokenizer.spm_keys import fit_vocabulary, read_spm_keys, spelt_with_spaces
from treadle.convert.sources.llama_names import EPS, check_llama, llama_keys
from treadle.convert.sources.source import F32, Bytes, Source, SourceTensor
from treadle.errors import FileError
from treadle.files.llama2c import Llama2c, Llama2cTensor
from treadle.files.reader import read_head
from treadle.formats import by_name

Q8_0 = by_name("Q8_0")
MAX_BYTES = 64 << 20  # limit of a tokenizer file
HALF_MAX = float(np.finfo(np.float16).max)


def open_llama2c(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a checkpoint as a source, with the given tokenizer file or the one next to it. Raises
    FileError, UnsupportedError.
    """
    model = Llama2c(path)
    n = model.sizes
    vocabulary = tokenizer or find_tokenizer(path, n["n_vocab"])
    tensors = {t.name: _tensor(t) for t in model.tensors.values()}
    check_llama(path, tensors, n)
    metadata = llama_keys(path, **n, eps=EPS["llama2"])
    metadata |= read_tokenizer(vocabulary, n["n_vocab"])
    fit_vocabulary(metadata, n["n_vocab"], vocabulary)
    return Source(path, metadata, tensors, [model])


def _tensor(t: Llama2cTensor) -> SourceTensor:
    fits = t.group and t.group % Q8_0.block == 0 and t.shape[-1] % Q8_0.block == 0
    reads: list[tuple[int, Callable[[], Bytes]]] = [
        (F32.ggml_id, lambda: t.data if not t.group else _dequantized(t)),
        (Q8_0.ggml_id, lambda: _as_q8_0(t)),
    ]
    ggml_type, read = reads[bool(fits)]
    return SourceTensor(t.name, t.shape, ggml_type, read, f"{t.path}: {t.name}", (t,))


def _dequantized(t: Llama2cTensor) -> Bytes:
    codes = t.data.view(np.int8).reshape(-1, t.group)
    return (codes * t.scales[:, None]).astype(np.float32).reshape(-1).view(np.uint8)


def _as_q8_0(t: Llama2cTensor) -> Bytes:
    """Convert to Q8_0 bytes: codes are kept, and the blocks of a group get its scale. Raises
    FileError for scales beyond f16.
    """
    scales = t.scales
    if not bool(np.all(np.abs(scales) <= HALF_MAX)):
        what = "a scale that is not finite in f16"
        raise t.error(what, "at most 65504", offset=t.offset)
    codes = t.data.view(np.int8).reshape(-1, Q8_0.block)
    blocks = np.empty(len(codes), Q8_0.dtype)
    blocks["qs"] = codes
    blocks["d"] = np.repeat(scales, t.group // Q8_0.block)
    return blocks.view(np.uint8)


# -- tokenizers -------------------------------------------------------------------------------


def find_tokenizer(path: Path, n_vocab: int) -> Path:
    """Return the tokenizer file next to a checkpoint, by llama2.c's file names. Raises FileError if
    there is none.
    """
    names = [f"tok{n_vocab}.model", f"tok{n_vocab}.bin", "tokenizer.model", "tokenizer.bin"]
    for name in names:
        if (path.parent / name).is_file():
            return path.parent / name
    expected = f"{', '.join(names)}, or --tokenizer FILE"
    raise FileError("no tokenizer in its folder", path=path, expected=expected)


def read_tokenizer(path: Path, n_vocab: int) -> dict[str, Any]:
    """Return GGUF's keys of a ``tokenizer.bin``, or of the sentencepiece model that it was exported
    from. Raises FileError for other files.

    ``tokenizer.bin``: the longest piece's length, then ``n_vocab`` x {score:f32 length:i32 bytes}.
    """
    raw = read_head(path, MAX_BYTES + 1, "a tokenizer")
    try:
        read = _pieces(raw, n_vocab)
    except ValueError as e:
        if raw[:1] == b"\x0a":  # the first field of a ModelProto
            return read_spm_keys(path)
        what = f"is not a tokenizer of {n_vocab} tokens: {e}"
        raise FileError(what, path=path, expected="llama2.c's tokenizer.bin") from None
    pieces, scores = zip(*read, strict=True)
    return spelt_with_spaces(pieces, scores)


def _pieces(raw: bytes, n_vocab: int) -> list[tuple[bytes, float]]:
    longest = int.from_bytes(raw[:4], "little")
    found = []
    at = 4
    for i in range(n_vocab):
        if at + 8 > len(raw):
            raise ValueError(f"cut short at piece {i}")
        score, n = struct.unpack_from("<fi", raw, at)
        if not 0 <= n <= longest or at + 8 + n > len(raw):
            raise ValueError(f"piece {i} of {n} bytes, where the longest has {longest}")
        found.append((raw[at + 8 : at + 8 + n], score))
        at += 8 + n
    if at != len(raw):
        raise ValueError(f"{len(raw) - at} bytes after the last piece")
    return found
