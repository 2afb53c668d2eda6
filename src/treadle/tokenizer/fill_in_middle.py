"""Fill-in-the-middle prompts, of the text before and after a gap, for models with tokens for
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError

if TYPE_CHECKING:
    from treadle.tokenizer.tokenizer import Tokenizer

# By GGUF's key: its older name, and the families' names of the token for files without a key.
TOKENS = {
    "fim_pre": (
        "prefix",
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "▁<PRE>",
        "<PRE>",
        "<｜fim▁begin｜>",
        "[PREFIX]",
    ),
    "fim_suf": (
        "suffix",
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "▁<SUF>",
        "<SUF>",
        "<｜fim▁hole｜>",
        "[SUFFIX]",
    ),
    "fim_mid": (
        "middle",
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "▁<MID>",
        "<MID>",
        "<｜fim▁end｜>",
        "[MIDDLE]",
    ),
    "fim_rep": ("", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("", "<|file_sep|>", "<file_sep>"),
}


def fim_token(tokenizer: Tokenizer, role: str) -> int | None:
    """Return the id of the token whose role is the key ``role`` of ``TOKENS``; None if the
    vocabulary has none.
    """
    older, *names = TOKENS[role]
    specials = tokenizer.vocab.specials
    for key in (role, older):
        if key in specials:
            return specials[key]
    found = (tokenizer.token_id(name) for name in names)
    return next((token for token in found if token is not None), None)


def infill_ids(
    tokenizer: Tokenizer,
    before: str,
    behind: str,
    *,
    begun: str = "",
    files: Iterable[tuple[str, str]] = (),
) -> list[int]:
    """Return the ids of a prompt after which the model writes the text between ``before`` and
    ``behind``.

    ``begun``: the beginning of the text to be written; ``files``: name and text of other files of
    the project. Raises UnsupportedError if the vocabulary has no tokens for filling in the middle.
    """
    roles = ("fim_pre", "fim_suf", "fim_mid")
    marks = [token for role in roles if (token := fim_token(tokenizer, role)) is not None]
    if len(marks) < 3:
        raise UnsupportedError("this model's vocabulary has no tokens for filling in the middle")

    def ids(text: str) -> list[int]:
        return tokenizer.encode_plain(text, start=False) if text else []

    made = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    repository = fim_token(tokenizer, "fim_rep")
    separator = fim_token(tokenizer, "fim_sep")
    for n, (name, text) in enumerate(files):
        if separator is None:
            made += ids(f"{text}\n")
        else:
            made += [repository, *ids("project\n")] if not n and repository is not None else []
            made += [separator, *ids(f"{name}\n{text}")]
    prefix, suffix, middle = marks
    return [*made, prefix, *ids(before), suffix, *ids(behind), middle, *ids(begun)]
