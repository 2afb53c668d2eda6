"""Vocabularies to test with: written as real GGUF files, from real data or made up."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from treadle.errors import GrammarError
from treadle.files.gguf import open_gguf
from treadle.files.gguf_writer import GGUFWriter
from treadle.files.metadata import ValueType
from treadle.grammar.grammar import Grammar
from treadle.jit.cache import checked_folder, write_whole
from treadle.tokenizer.bpe import BYTE_OF_LETTER
from treadle.tokenizer.tokenizer import Tokenizer, load_tokenizer
from treadle.tokenizer.vocab import TokenType

NORMAL = TokenType.NORMAL
UNKNOWN = TokenType.UNKNOWN
CONTROL = TokenType.CONTROL
USER_DEFINED = TokenType.USER_DEFINED
UNUSED = TokenType.UNUSED
BYTE = TokenType.BYTE
LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
SEPARATOR = "\n__ggml_vocab_test__\n"

Piece = tuple[str | bytes, TokenType]


def write_vocab(
    path: Path,
    model: str,
    pieces: Iterable[Piece],
    *,
    arch: str = "llama",
    scores: Sequence[float] | None = None,
    merges: Sequence[str] | None = None,
    **keys: Any,
) -> Path:
    """A GGUF file of a vocabulary alone. ``keys`` are of ``tokenizer.ggml.``; None leaves out."""
    pieces = list(pieces)
    writer = GGUFWriter(path)
    writer.add("general.architecture", arch)
    writer.add("tokenizer.ggml.model", model)
    writer.add("tokenizer.ggml.tokens", [piece for piece, _ in pieces], ValueType.STRING)
    types = [int(kind) for _, kind in pieces]
    writer.add("tokenizer.ggml.token_type", types, ValueType.INT32)
    if scores is not None:
        whole = getattr(scores, "dtype", None) == np.int32
        writer.add("tokenizer.ggml.scores", scores, None if whole else ValueType.FLOAT32)
    if merges is not None:
        writer.add("tokenizer.ggml.merges", merges, ValueType.STRING)
    for key, value in keys.items():
        if value is not None:
            name = key.replace("__", ".")
            writer.add(name if "." in name else f"tokenizer.ggml.{name}", value)
    writer.write()
    return path


def spm_pieces(words: Iterable[Piece] = ()) -> list[Piece]:
    """Unknown, <s>, </s>, 256 bytes, then ``words``."""
    head: list[Piece] = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    return [*head, *((f"<0x{b:02X}>", BYTE) for b in range(256)), *words]


def load_spm(path: Path, words: Iterable[Piece] = (), **keys: Any) -> Tokenizer:
    """An SPM tokenizer whose words are better the earlier they come."""
    pieces = spm_pieces(words)
    scores = [-float(i) for i in range(len(pieces))]
    return load_tokenizer(open_gguf(write_vocab(path, "llama", pieces, scores=scores, **keys)))


def letters(data: bytes) -> str:
    """Bytes as GPT-2 writes them."""
    return "".join(LETTER_OF_BYTE[byte] for byte in data)


def load_bpe(
    path: Path, merges: Sequence[str] = (), more: Iterable[Piece] = (), **keys: Any
) -> Tokenizer:
    """A byte-level tokenizer: 256 bytes in order, a piece for each merge, then ``more``."""
    pieces: list[Piece] = [(LETTER_OF_BYTE[b], NORMAL) for b in range(256)]
    pieces += [(merge.replace(" ", ""), NORMAL) for merge in merges]
    keys = {"pre": "gpt-2"} | keys
    return load_tokenizer(
        open_gguf(write_vocab(path, "gpt2", [*pieces, *more], merges=merges, **keys))
    )


def write_qwen2(data: Path, path: Path, most: int | None = None) -> Path:
    """Qwen2's vocabulary from its merges: 256 bytes in GPT-2's order, then the merges' products.
    ``most``: only the first tokens, and the special ones.
    """
    lines = (data / "tokenizers/qwen2_merges.txt").read_text("utf-8").split("\n")
    merges = [line for line in lines if line][: most and most - len(BYTE_OF_LETTER)]
    pieces: list[Piece] = [(letter, NORMAL) for letter in BYTE_OF_LETTER]
    pieces += [(merge.replace(" ", ""), NORMAL) for merge in merges]
    n = len(pieces)
    pieces += [(name, CONTROL) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    return write_vocab(
        path, "gpt2", pieces, arch="qwen2", merges=merges, pre="qwen2", eos_token_id=n + 2
    )


LLAMA3_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
)


def write_llama3(data: Path, path: Path, most: int | None = None) -> Path:
    """Llama 3's vocabulary from its ranks: the merge of a token is how lower ranks make it. That
    takes long, so all processes of a run share the list of merges. ``most``: only the first tokens,
    and the special ones.
    """
    lines = (data / "tokenizers/llama3.tiktoken").read_text("ascii").split("\n")[:most]
    tokens = [base64.b64decode(line.split()[0]) for line in lines if line]
    source = hashlib.sha256(Path(__file__).read_bytes() + "\n".join(lines).encode()).hexdigest()
    shared = checked_folder(Path(os.environ["TREADLE_TEST_CACHE"]))
    kept = shared / "merges" / f"{source[:32]}.txt"
    try:
        merges = kept.read_text("utf-8").split("\n")
    except FileNotFoundError:
        ranks = {token: rank for rank, token in enumerate(tokens)}
        merges = [merge for token in tokens if (merge := _merge_of(token, ranks))]
        kept.parent.mkdir(exist_ok=True)
        write_whole(kept, "\n".join(merges).encode())
    pieces: list[Piece] = [(letters(token), NORMAL) for token in tokens]
    pieces += [(name, CONTROL) for name in LLAMA3_SPECIALS]
    keys: dict[str, Any] = {
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 9,
        "pre": "llama-bpe",
    }
    return write_vocab(path, "gpt2", pieces, merges=merges, **keys)


def _merge_of(token: bytes, ranks: dict[bytes, int]) -> str | None:
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, len(ranks)) for a, b in pairwise(parts)]
        best = min(pairs)
        if best >= ranks[token]:
            return None
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return " ".join(map(letters, parts)) if len(parts) == 2 else None


def read_pairs(data: Path, name: str) -> list[tuple[str, list[int]]]:
    """llama.cpp's own texts and ids for a vocabulary."""
    stem = data / "vocab" / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{stem}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{stem}.out").read_text("ascii").split("\n")[: len(texts)]
    return [(text, [int(i) for i in line.split()]) for text, line in zip(texts, lines, strict=True)]


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the whole text is in the language, one byte a token (byte ``b`` is ``b + 3``)."""
    matcher = grammar.matcher()
    try:
        for byte in text.encode():
            matcher.accept(3 + byte)
    except GrammarError:
        return False
    return matcher.accepting
