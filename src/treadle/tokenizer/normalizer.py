"""What is done to a text before a Unigram vocabulary cuts it: steps, each a word.

GGUF has three keys for it, and tokenizer.json knows more ways. Where these three would read a text
otherwise, ``treadle convert`` writes all steps in their order in a key of treadle's own, such as
"charsmap strip_right runs_marked always". The last word says where a mark of a space is put in
front: of every part of a text between special tokens, of the text alone, or of none. Vocabularies
of bytes, and SentencePiece's BPE, have the last word alone: no space is put before one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

SPACES = "treadle.tokens.spaces"
MARK = "▁"
CHARSMAP = "charsmap"  # the table of tokenizer.ggml.precompiled_charsmap
STRIPS = {"strip": (True, True), "strip_left": (True, False), "strip_right": (False, True)}
REPLACES = {  # the first by the second
    "runs": (" {2,}", " "),
    "runs_marked": (" {2,}", MARK),
    "white": (r"\s+", " "),
    "white_marked": (r"\s+", MARK),
}
# Unicode's forms, and others that are the same for all texts: the names of their classes.
FORMS = {
    "nfc": "NFC",
    "nfd": "NFD",
    "nfkc": "NFKC",
    "nfkd": "NFKD",
    "nmt": "Nmt",
    "lowercase": "Lowercase",
    "strip_accents": "StripAccents",
}
WORDS = "words"  # white space goes, and what lies between is cut by itself
WHOLE = "whole"  # a piece may reach over a mark
PREPENDS = ("always", "first", "never")
NORMALIZERS = (CHARSMAP, *STRIPS, *REPLACES, *FORMS)
BETWEEN: tuple[list[str], ...] = ([], [WORDS], [WHOLE], [WORDS, WHOLE])  # these and the last word


def usual_steps(charsmap: bool, removes: bool, adds: bool) -> list[str]:
    """What a file means that has GGUF's three keys alone."""
    before = [CHARSMAP] * charsmap + ["strip", "runs"] * removes
    return [*before, WHOLE, "always" if adds else "never"]


def is_sound(steps: Sequence[str]) -> bool:
    """Whether these are steps in an order that can be run."""
    n = next((i for i, step in enumerate(steps) if step not in NORMALIZERS), len(steps))
    return n < len(steps) and [*steps[n:-1]] in BETWEEN and steps[-1] in PREPENDS


def normalizer(steps: Iterable[str], charsmap: bytes) -> Any:
    """The steps before the cutting, for ``tokenizers``; it raises Exception for a bad table."""
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
    """The cutting, for ``tokenizers``."""
    from tokenizers.pre_tokenizers import Metaspace, Sequence, WhitespaceSplit

    marks = Metaspace(MARK, prepend, split=WHOLE not in steps)
    return Sequence([WhitespaceSplit(), marks]) if WORDS in steps else marks
