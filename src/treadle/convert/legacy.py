"""GGML, GGMF and GGJT files of llama models, and GGUF version 1, as sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.convert.meta import COLUMNS, FREQS, ROWS, gguf_name, read_joined
from treadle.convert.opened import (
    EPS,
    Opened,
    as_f32,
    check_llama,
    llama_keys,
    llama_sizes,
)
from treadle.convert.source import FileRange, SourceTensor
from treadle.convert.spm_keys import spelt_with_spaces
from treadle.errors import FileError
from treadle.files.gguf_v1 import GGUFv1
from treadle.files.legacy import Legacy, LegacyTensor

N_CTX = 2048  # of LLaMA 1: what all programs of that time took for granted
SPACES = -1e9  # the score that LLaMA's vocabulary has for runs of spaces: they are merged last
FIRST_MERGED = 259  # LLaMA's first piece that is no byte and no control


def open_gguf_v1(path: Path, tokenizer: Path | None = None) -> Opened:
    """A GGUF of version 1, or of before its release."""
    model = GGUFv1(path)
    metadata = {_renamed(key): value for key, value in model.metadata.items()}
    tensors = {name: _tensor(name, [tensor], None) for name, tensor in model.tensors.items()}
    return Opened(path, metadata, tensors, [model], verbatim=True)


def _renamed(key: str) -> str:
    """A key as the release has it; before it some were called otherwise."""
    return {"tokenizer.ggml.separator_token_id": "tokenizer.ggml.seperator_token_id"}.get(key, key)


def open_legacy(path: Path, tokenizer: Path | None = None) -> Opened:
    """A GGML, GGMF or GGJT file; the first two may come in parts (``FILE``, ``FILE.1`` ...)."""
    first = Legacy(path)
    parts = [first]
    while first.layout == 0 and (more := Path(f"{path}.{len(parts)}")).is_file():
        parts.append(Legacy(more))
        if parts[-1].sizes != first.sizes or parts[-1].kind != first.kind:
            raise FileError("is a part of another model", path=more, expected=f"one of {path.name}")
    tensors = _join_all(parts)
    sizes = dict(first.sizes)
    n_embd, n_head = sizes["n_embd"], sizes["n_head"]
    head_dim = n_embd // n_head
    n_ff = -(-(2 * (4 * n_embd) // 3) // sizes["n_mult"]) * sizes["n_mult"]
    gate, key = tensors.get("blk.0.ffn_gate.weight"), tensors.get("blk.0.attn_k.weight")
    n = {
        "n_vocab": sizes["n_vocab"],
        "n_embd": n_embd,
        "n_ff": gate.shape[0] if gate else n_ff,
        "n_head": n_head,
        "n_head_kv": max(1, key.shape[0] // head_dim) if key else n_head,
    }
    if tensors:  # a vocabulary alone has none
        check_llama(path, tensors, llama_sizes(**n), sizes["n_layer"])
    eps = EPS["llama1"]
    metadata = llama_keys(path, **n, n_layer=sizes["n_layer"], n_ctx=N_CTX, eps=eps)
    metadata |= _vocabulary(first)
    notes = [
        f"{first.kind} files name neither the norms' epsilon nor the context length: {eps:g} and "
        f"{N_CTX}, as of LLaMA 1 (Llama 2: --set llama.attention.layer_norm_rms_epsilon=1e-5 "
        "--set llama.context_length=4096)"
    ]
    return Opened(path, metadata, tensors, parts, notes)


def _vocabulary(file: Legacy) -> dict[str, Any]:
    """The pieces. GGML has no scores: those of LLaMA's vocabulary, which all such files have, count
    down from its first merged piece.
    """
    scores = file.scores
    if scores is None:
        scores = [min(0.0, float(FIRST_MERGED - i)) for i in range(len(file.pieces))]
        for i, text in enumerate(file.pieces[FIRST_MERGED:], FIRST_MERGED):
            if text and not text.strip(b" "):
                scores[i] = SPACES
    return spelt_with_spaces(file.pieces, scores)


def _join_all(parts: list[Legacy]) -> dict[str, SourceTensor]:
    found: dict[str, SourceTensor] = {}
    for part in parts:
        if odd := part.tensors.keys() ^ parts[0].tensors.keys():
            raise FileError("is not in every part", path=part.path, where=min(odd))
    for name in parts[0].tensors:
        if FREQS.fullmatch(name):
            continue
        row = gguf_name(name)
        if row is None:
            expected = "the tensors of a llama and no more"
            raise FileError("surplus", path=parts[0].path, where=name, expected=expected)
        pieces = [part.tensors[name] for part in parts]
        for piece in pieces:
            if (piece.shape, piece.ggml_type) != (pieces[0].shape, pieces[0].ggml_type):
                expected = f"{list(pieces[0].shape)}, as in the other parts"
                what = f"shape {list(piece.shape)}"
                raise FileError(what, path=piece.path, where=name, expected=expected)
        made = _tensor(row[0], pieces, row[1])
        found[row[0]] = as_f32(made) if len(made.shape) == 1 else made
    return found


def _tensor(name: str, pieces: list[LegacyTensor], axis: int | None) -> SourceTensor:
    first, shape = pieces[0], list(pieces[0].shape)
    copies = []
    if axis in (ROWS, COLUMNS) and len(shape) > 1:
        shape[axis] *= len(pieces)
    else:
        copies = [(first, other) for other in pieces[1:]]
        pieces = pieces[:1]
    ranges = tuple(FileRange(p.path, p.offset, p.n_bytes) for p in pieces)
    return SourceTensor(
        name,
        tuple(shape),
        first.ggml_type,
        lambda: read_joined(pieces, axis, copies),
        f"{first.path}: {first.name}",
        ranges,
    )
