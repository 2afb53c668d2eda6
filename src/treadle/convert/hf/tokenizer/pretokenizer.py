"""Identifies GGUF's pre-tokenizer from the structure of a tokenizer.json.

A byte-level tokenizer.json lists how it splits text into words: expressions, digits, punctuation.
The entry of ``treadle/tokenizer/pretokenizers.py`` with the same list has GGUF's name.
"""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

from treadle.errors import UnsupportedError
from treadle.tokenizer.pretokenizers import DEFAULT, PRE_TOKENIZERS

# Preferred names, if several mean the same pre-tokenizer.
_FIRST = ("llama-bpe", "qwen2", "gpt-2", "smollm", "tekken", "gpt-4o", "smaug-bpe", "deepseek-v3")
_ESCAPED = re.compile(r"\\u([0-9a-fA-F]{4})|\\x\{([0-9a-fA-F]{1,6})\}")

_DIGITS = r"\p{N}+"
# tokenizer.json's spellings of expressions in the tables: BLOOM's nested character class, and the
# groups of three digits of SuperBPE and Tiny Aya.
_SPELT = {
    " ?[^(\\s|[.,!?…。，、।۔،])]+": PRE_TOKENIZERS["bloom"].patterns[0],
    r"(?=(\d{3})+(?!\d))": PRE_TOKENIZERS["superbpe"].patterns[1],
    r"\d{1,3}(?=(?:\d{3})*\b)": PRE_TOKENIZERS["tiny_aya"].patterns[0],
}

Cuts = tuple[str, ...]


def find_pre(tokenizer: dict[str, Any], path: Path) -> str:
    """Return ``tokenizer.ggml.pre`` of a byte-level BPE tokenizer.json. Raises UnsupportedError if
    none fits.
    """
    cuts = _cuts(tokenizer.get("pre_tokenizer"), path)
    punctuation, words, threes = PRE_TOKENIZERS["falcon"].patterns
    if cuts == (punctuation, words, _DIGITS, threes) and _digits_stay_apart(tokenizer["model"]):
        cuts = punctuation, words, threes
    ignores = tokenizer["model"].get("ignore_merges") is True
    same_cuts = [name for name in _names() if _canonical(PRE_TOKENIZERS[name].patterns) == cuts]
    for name in same_cuts:
        if PRE_TOKENIZERS[name].ignore_merges == ignores:
            return name
    # ignore_merges takes whole pieces first; this makes no difference if merges make every piece.
    if same_cuts and _merges_make_all(tokenizer["model"]):
        return same_cuts[0]
    raise UnsupportedError(
        f"{path}: pre_tokenizer cuts words by {' then '.join(cuts)!r:.300}"
        f"{' and matches whole tokens first' if ignores else ''}: no GGUF pre-tokenizer does this, "
        "and another one would silently give the model wrong tokens"
    )


def _names() -> list[str]:
    return [*_FIRST, *(name for name in PRE_TOKENIZERS if name not in (*_FIRST, DEFAULT))]


def _canonical(cuts: Cuts) -> Cuts:
    """Replace hexadecimal escapes of characters by the characters, so that expressions of
    tokenizer.json and of the tables compare equal.
    """
    return tuple(
        _ESCAPED.sub(lambda m: re.escape(chr(int(m[1] or m[2], 16))), cut)
        if _ESCAPED.search(cut)
        else cut
        for cut in cuts
    )


def puts_space(node: Any) -> bool:
    """Return whether a tokenizer.json's pre-tokenizer (``node``), one that ``find_pre`` accepts,
    puts a space before a text.
    """
    while isinstance(node, dict) and node.get("type") == "Sequence" and node.get("pretokenizers"):
        node = node["pretokenizers"][0]
    kind = node.get("type") if isinstance(node, dict) else None
    return kind == "ByteLevel" and node.get("add_prefix_space", True) is True


def _cuts(node: Any, path: Path, whole: bool = True) -> Cuts:
    """Return the expressions by which a pre-tokenizer (``node`` of tokenizer.json) splits a text
    into words, in the order of application.

    ``whole``: the text is not split yet. If it is, a rule that puts a space before each word raises
    UnsupportedError, as do unknown rules.
    """
    if not isinstance(node, dict):
        raise UnsupportedError(f"{path}: pre_tokenizer is {node!r:.60}: not supported")
    kind = node.get("type")
    if kind == "Sequence" and isinstance(node.get("pretokenizers"), list):
        parts = enumerate(node["pretokenizers"])
        return tuple(cut for i, part in parts for cut in _cuts(part, path, whole=whole and not i))
    if kind == "ByteLevel" and (whole or not node.get("add_prefix_space", True)):
        return PRE_TOKENIZERS["gpt-2"].patterns if node.get("use_regex", True) else ()
    if kind == "Digits":
        return (r"\p{N}" if node.get("individual_digits") else _DIGITS,)
    if kind == "Split" and isinstance(node.get("pattern"), dict):
        pattern = node["pattern"]
        how = (node.get("behavior"), node.get("invert", False))
        text = pattern.get("Regex", re.escape(str(pattern.get("String", ""))))
        # Matches and the text between them are words; or matches alone, if the expression matches
        # everything.
        if isinstance(text, str) and how in (("Isolated", False), ("Removed", True)):
            return _canonical((_SPELT.get(text, text),))
    if kind == "Punctuation" and node.get("behavior") == "Contiguous":
        return (PRE_TOKENIZERS["falcon"].patterns[0],)
    raise UnsupportedError(f"{path}: pre_tokenizer {kind!r:.60} {node!r:.200}: not supported")


def _merges_make_all(model: dict[str, Any]) -> bool:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    pieces = model["vocab"]
    merges = _merges(model)
    try:
        bare = Tokenizer(BPE(pieces, merges))
    except Exception:  # tokenizers raises Exception itself
        return False
    made = {left + right for left, right in merges}
    return all(
        len(e.ids) == 1 for e in bare.encode_batch([p for p in pieces if p in made])
    ) and all(len(piece) == 1 or piece in made for piece in pieces)


def _digits_stay_apart(model: dict[str, Any]) -> bool:
    """Return whether no merge of a BPE ``model`` joins a digit with another character, as in
    Falcon: then splitting around digits, which GGUF's pre-tokenizer does not do, makes no
    difference.
    """
    return not any(
        len({unicodedata.category(c).startswith("N") for c in left + right}) > 1
        for left, right in _merges(model)
    )


def _merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    pairs = [m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"]]
    return [(left, right) for left, right in pairs]
