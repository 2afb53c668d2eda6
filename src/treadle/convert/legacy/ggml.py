"""GGML, GGMF and GGJT files of llama models, and GGUF version 1, as sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treadle.convert.hf.tokenizer.spm_keys import spelt_with_spaces
from treadle.convert.sources.gguf import gguf_source
from treadle.convert.sources.llama_names import EPS, check_llama, join, llama_keys, named_pieces
from treadle.convert.sources.source import Source, SourceTensor
from treadle.errors import FileError
from treadle.files.gguf import GGUF
from treadle.files.gguf_v1 import HeaderV1
from treadle.files.legacy import Legacy

N_CTX = 2048  # LLaMA 1's, which all programs of that time assumed
SPACES = -1e9  # score of runs of spaces in LLaMA's vocabulary: they are merged last
FIRST_MERGED = 259  # LLaMA's first piece that is neither a byte nor a control token
# Keys of GGUF files from before its release -> today's names.
RENAMED = {"tokenizer.ggml.separator_token_id": "tokenizer.ggml.seperator_token_id"}


def open_gguf_v1(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a GGUF file of version 1, or one from before its release (``FUGG``), as a source.
    ``tokenizer`` is unused.
    """
    source = gguf_source(GGUF([HeaderV1(path)]))
    source.metadata = {RENAMED.get(key, key): v for key, v in source.metadata.items()}
    return source


def open_legacy(path: Path, tokenizer: Path | None = None) -> Source:
    """Open a GGML, GGMF or GGJT file as a source; the first two may be split (``FILE``, ``FILE.1``
    ...). ``tokenizer`` is unused. Raises FileError for damaged files, and parts of several models.
    """
    first = Legacy(path)
    parts = [first]
    while first.layout == 0 and (more := Path(f"{path}.{len(parts)}")).is_file():
        parts.append(Legacy(more))
        if parts[-1].sizes != first.sizes or parts[-1].kind != first.kind:
            raise FileError("is a part of another model", path=more, expected=f"one of {path.name}")
    tensors = _join_all(parts)
    sizes = first.sizes
    n_embd = sizes["n_embd"]
    n_head = sizes["n_head"]
    head_dim = n_embd // n_head
    n_ff = -(-(2 * (4 * n_embd) // 3) // sizes["n_mult"]) * sizes["n_mult"]
    gate = tensors.get("blk.0.ffn_gate.weight")
    key = tensors.get("blk.0.attn_k.weight")
    n = {
        "n_vocab": sizes["n_vocab"],
        "n_embd": n_embd,
        "n_ff": gate.shape[0] if gate else n_ff,
        "n_head": n_head,
        "n_head_kv": max(1, key.shape[0] // head_dim) if key else n_head,
        "n_layer": sizes["n_layer"],
    }
    if tensors:  # a vocabulary alone has none
        check_llama(path, tensors, n)
    eps = EPS["llama1"]
    metadata = llama_keys(path, **n, n_ctx=N_CTX, eps=eps)
    metadata |= _vocabulary(first)
    notes = [
        f"{first.kind} files store neither the norm epsilon nor the context length: using {eps:g} "
        f"and {N_CTX}, as in LLaMA 1 (Llama 2: --set llama.attention.layer_norm_rms_epsilon=1e-5 "
        "--set llama.context_length=4096)"
    ]
    return Source(path, metadata, tensors, parts, notes)


def _vocabulary(file: Legacy) -> dict[str, Any]:
    """Return the vocabulary's keys. GGML files have no scores, but all have LLaMA's vocabulary,
    whose scores count down from 0 at the first merged piece.
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
    for name, axis, pieces in named_pieces(parts, "is not in all parts"):
        first = pieces[0]
        for piece in pieces:
            if (piece.shape, piece.ggml_type) != (first.shape, first.ggml_type):
                expected = f"{list(first.shape)}, as in the other parts"
                raise piece.error(f"shape {list(piece.shape)}", expected)
        made = join(name, pieces, axis if len(first.shape) > 1 else None, first.ggml_type)
        found[name] = made.as_f32() if len(made.shape) == 1 else made
    return found
