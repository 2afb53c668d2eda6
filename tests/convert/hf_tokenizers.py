"""Tokenizer files as Hugging Face ships them, made of real vocabularies with the library itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from tests.models.hf_tiny import require_transformers
from tests.tokenizer.vocabularies import LLAMA3_SPECIALS, write_llama3, write_qwen2
from treadle.files.gguf import GGUF, open_gguf
from treadle.tokenizer.bpe import merge_pairs
from treadle.tokenizer.pretokenizers import PRE_TOKENIZERS
from treadle.tokenizer.vocab import TokenType, texts

MARK = "\u2581"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def byte_level(*first: Any, use_regex: bool = False) -> Any:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    return pre_tokenizers.Sequence([*first, letters]) if first else letters


def split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior, invert=invert)


# As the families' own files have them.
PRE: dict[str, Any] = {
    "gpt-2": lambda: byte_level(use_regex=True),
    "starcoder": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True),
    "falcon": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            byte_level(use_regex=True),
            split("[0-9][0-9][0-9]"),
        ]
    ),
    "llama-bpe": lambda: byte_level(split(LLAMA3)),
    "qwen2": lambda: byte_level(split(QWEN2)),
}


FEW = 4000  # pieces: what tests need that are not about a whole vocabulary


def byte_level_tokenizer(data: Path, name: str, folder: Path, *, whole: bool = False) -> Tokenizer:
    """The vocabulary ``name`` of the shared data as the tokenizers library has it: the special
    tokens and the first pieces of it, or the whole, which takes seconds.
    """
    writers = {"qwen2": write_qwen2, "llama-bpe": write_llama3}
    path = data / "vocab" / f"ggml-vocab-{name}.gguf"
    if name in writers:
        path = writers[name](data, folder / "vocabulary.gguf", None if whole else FEW)
    with open_gguf(path) as gguf:
        pieces, types, merges = _vocabulary(gguf)
    if not whole:
        kept = [i for i, kind in enumerate(types) if i < FEW or kind != TokenType.NORMAL]
        pieces = [pieces[i] for i in kept]
        types = [types[i] for i in kept]
        made = set(pieces)
        merges = [(left, right) for left, right in merges if left + right in made]
    # Added tokens behind the vocabulary get their ids when they are added; those within have them.
    n = max(i for i, kind in enumerate(types) if kind == TokenType.NORMAL) + 1
    normal = {piece: i for i, piece in enumerate(pieces[:n])}
    ignore = PRE_TOKENIZERS[name].ignore_merges
    tokenizer = Tokenizer(BPE(normal, merges, ignore_merges=ignore))
    tokenizer.pre_tokenizer = PRE[name]()
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    added = [i for i in range(len(pieces)) if types[i] != TokenType.NORMAL]
    tokenizer.add_tokens([AddedToken(pieces[i], special=True, normalized=False) for i in added])
    if name == "llama-bpe":
        bos = LLAMA3_SPECIALS[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def _vocabulary(gguf: GGUF) -> tuple[list[str], Sequence[int], list[tuple[str, str]]]:
    keys: dict[str, Any] = {
        k.rpartition(".")[2]: v for k, v in gguf.metadata.items() if ".ggml." in k
    }
    return texts(keys["tokens"]), list(keys["token_type"]), merge_pairs(keys["merges"])


def spm_tokenizer(pieces: list[str], scores: list[float], *, prefix: bool = True) -> Tokenizer:
    """What transformers makes of a SentencePiece vocabulary whose first three are control."""
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [pair for piece, _ in by_score(pieces, scores) for pair in halves(piece, vocab)]
    fallback = "<0x00>" in vocab
    model = BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=fallback)
    tokenizer = Tokenizer(model)
    steps = [normalizers.Prepend(MARK)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", MARK)])
    tokenizer.add_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def by_score(pieces: list[str], scores: list[float]) -> list[tuple[str, float]]:
    """Pieces with their scores, the best first."""
    return sorted(zip(pieces, scores, strict=True), key=lambda each: -each[1])


def halves(piece: str, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces that a piece may be merged of, in transformers' order."""
    cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
    found = [pair for pair in cuts if pair[0] in vocab and pair[1] in vocab]
    return sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def save_files(tokenizer: Tokenizer, folder: Path, **settings: Any) -> None:
    """tokenizer.json, and tokenizer_config.json with these settings."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")


def save(tokenizer: Tokenizer, folder: Path, template: str | None = None, **tokens: Any) -> Any:
    """All the files that transformers writes for it; returns transformers' tokenizer."""
    require_transformers()
    from transformers import PreTrainedTokenizerFast

    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **tokens)
    whole.chat_template = template
    whole.save_pretrained(folder)
    return whole
