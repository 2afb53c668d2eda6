"""Text normalization before a Unigram vocabulary splits it: steps, each named by a word.

GGUF has three keys for it; tokenizer.json allows more. Where GGUF's keys would give other tokens
than tokenizer.json, ``treadle convert`` writes all steps in order to a key of treadle's own, such
as "charsmap strip_right runs_marked always". The last word tells where a space mark is put in
front: of every part of a text between special tokens, of the text alone, or of none. For byte-level
BPE and SentencePiece's BPE the key has the last word only: a text that begins with a space gets no
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MARK = "▁"
CHARSMAP = "charsmap"  # uses the table of tokenizer.ggml.precompiled_charsmap
STRIPS = {"strip": (True, True), "strip_left": (True, False), "strip_right": (False, True)}
REPLACES = {  # pattern and replacement
    "runs": (" {2,}", " "),
    "runs_marked": (" {2,}", MARK),
    "white": (r"\s+", " "),
    "white_marked": (r"\s+", MARK),
}
# Unicode's forms, and others without settings: their classes in ``tokenizers``.
FORMS = {
    "nfc": "NFC",
    "nfd": "NFD",
    "nfkc": "NFKC",
    "nfkd": "NFKD",
    "nmt": "Nmt",
    "lowercase": "Lowercase",
    "strip_accents": "StripAccents",
}
WORDS = "words"  # white space is dropped, and each word is split by itself
WHOLE = "whole"  # a piece may span a space mark
PREPENDS = ("always", "first", "never")
NORMALIZERS = (CHARSMAP, *STRIPS, *REPLACES, *FORMS)
BETWEEN: tuple[list[str], ...] = ([], [WORDS], [WHOLE], [WORDS, WHOLE])  # before the last word


def usual_steps(charsmap: bool, removes: bool, adds: bool) -> list[str]:
    """Return the steps of a file that has only GGUF's three keys. ``charsmap``: it has a table;
    ``removes``: extra white space is removed; ``adds``: a space mark is put in front.
    """
    before = [CHARSMAP] * charsmap + ["strip", "runs"] * removes
    return [*before, WHOLE, "always" if adds else "never"]


def is_sound(steps: Sequence[str]) -> bool:
    """Return whether all steps are known, and in an order that can be run."""
    n = next((i for i, step in enumerate(steps) if step not in NORMALIZERS), len(steps))
    return n < len(steps) and [*steps[n:-1]] in BETWEEN and steps[-1] in PREPENDS


def normalizer(steps: Iterable[str], charsmap: bytes) -> Any:
    """Return the ``tokenizers`` normalizer that runs the steps before splitting; ``charsmap``: the
    file's precompiled table. Raises Exception, as tokenizers does, for a damaged table.
    """
    from tokenizers import Regex, normalizers
    from tokenizers.normalizers import Precompiled, Replace, Sequence, Strip

    made: list[Any] = []
    for step in steps:
        if step == CHARSMAP:
            made.append(Precompiled(charsmap))
        elif step in STRIPS:
            made.append(Strip(*STRIPS[step]))
        elif step in FORMS:
            made.append(getattr(normalizers, FORMS[step])())
        elif step in REPLACES:
            pattern, by = REPLACES[step]
            made.append(Replace(Regex(pattern), by))
    return Sequence(made)


def pre_tokenizer(steps: Sequence[str], prepend: str) -> Any:
    """Return the ``tokenizers`` pre-tokenizer that splits at spaces, as ``steps`` say. ``prepend``,
    one of PREPENDS: which parts of a text get a space mark in front.
    """
    from tokenizers.pre_tokenizers import Metaspace, Sequence, WhitespaceSplit

    marks = Metaspace(MARK, prepend, split=WHOLE not in steps)
    return Sequence([WhitespaceSplit(), marks]) if WORDS in steps else marks
