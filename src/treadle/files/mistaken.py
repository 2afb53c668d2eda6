"""Descriptions of files that are not models: broken downloads and other formats.

A row of KINDS has a file's first bytes, and its description for an error message.
"""

from __future__ import annotations

import json
import re

from treadle.base.humanize import n_bytes

N_HEAD = 1024  # bytes that suffice to identify a file
LFS = b"version https://git-lfs.github.com/spec/"
KINDS: tuple[tuple[bytes, str], ...] = (
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "compressed by gzip: unpack it with gunzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd: unpack it with unzstd"),
    (b"\xfd7zXZ\0", "compressed by xz: unpack it with unxz"),
    (b"BZh", "compressed by bzip2: unpack it with bunzip2"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it"),
    (b"Rar!", "a RAR archive: unpack it"),
    (b"PK\x03\x04", "a PyTorch checkpoint or another zip archive"),
    (b"\x80\x02", "a pickle, as old PyTorch checkpoints are"),
    (b"%PDF", "a PDF document"),
    (
        b"\x06\0\0\0\x0c\0WhisperSpec",
        "CTranslate2's file of a speech model; `treadle convert` converts it to GGUF",
    ),
    (b"\0" * 64, "it begins with zeros, like an unfinished download: download it again"),
)


def describe_file(head: bytes) -> str | None:
    """Return a description of the file that begins with ``head`` (N_HEAD bytes suffice): its kind
    and, if it is no model, often a remedy. None if the kind is unknown.
    """
    if head.startswith(LFS):
        size = re.search(rb"^size (\d{1,18})$", head, re.MULTILINE)
        stands = f" for {n_bytes(int(size[1]))}" if size else ""
        return f"a Git LFS pointer{stands}, not the file itself: run 'git lfs pull'"
    for magic, what in KINDS:
        if head.startswith(magic):
            return what
    if head[8:10] in (b'{"', b"{}") and int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file: name its folder, with config.json and the tokenizer"
    text = _text(head)
    if text is None:
        return None
    if re.match(r"<(!doctype|html|head|body|\?xml)", text, re.IGNORECASE):
        title = re.search(r"<title[^>]*>([^<]{1,80})", text, re.IGNORECASE)
        named = f" ({' '.join(title[1].split())!r})" if title else ""
        return f"an HTML page{named}, such as a login or an error: download the file itself"
    if text.startswith(("{", "[")):
        return f"a JSON file{_error_in(text)}, not a model"
    return f"a text file ({text.splitlines()[0][:60]!r}), not a model"


def _text(head: bytes) -> str | None:
    """Return ``head`` as text if it is printable UTF-8 of at least 8 characters, else None."""
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # more than one character cut at the end
            return None
        text = head[: error.start].decode("utf-8-sig")
    text = text.strip()
    whole = text.replace("\n", "").replace("\r", "").replace("\t", "")
    return text if len(text) >= 8 and whole.isprintable() else None


def _error_in(text: str) -> str:
    """Return the error message in a web site's JSON response, as the clause " that says ..."; "" if
    it has none.
    """
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    said = said.get("error") or said.get("message") if isinstance(said, dict) else None
    return f" that says {said[:80]!r}" if isinstance(said, str) else ""
