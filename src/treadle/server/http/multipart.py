"""Bodies of ``multipart/form-data``, as forms and OpenAI's clients send files.

Source: RFC 7578 and RFC 2046.
"""

from __future__ import annotations

import re

from treadle.base.fast_classes import dataclass
from treadle.server.http.api_errors import ApiError

MOST_PARTS = 64
MOST_HEAD = 4096  # bytes of a part's headers
MOST_TEXT = 1 << 16  # bytes of a field that is not a file
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_PARAMETER = re.compile(r';\s*(name|filename)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))', re.IGNORECASE)


@dataclass(frozen=True)
class FormPart:
    """A field of a form: its name, and ``data``, its bytes, a view of the body. filename: of a
    file, None for a field that is none.
    """

    name: str
    data: memoryview
    filename: str | None = None

    def text(self) -> str:
        """Return the value of a field that is not a file. Raises ApiError if it is too long or not
        UTF-8.
        """
        if len(self.data) > MOST_TEXT:
            raise ApiError(
                400, f"{self.name}: more than {MOST_TEXT >> 10} KiB of text", param=self.name
            )
        try:
            return bytes(self.data).decode("utf-8")
        except UnicodeDecodeError:
            raise ApiError(400, f"{self.name}: is not UTF-8", param=self.name) from None


def read_form(content_type: str, body: bytes) -> list[FormPart]:
    """Return the parts of a form's body, in order; their data are views of ``body``. Raises
    ApiError for a content type that is no form (415), and for a damaged body.
    """
    found = _BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or found is None:
        raise ApiError(
            415,
            f"content-type {content_type[:60]!r}: expected multipart/form-data with a boundary",
        )
    boundary = b"--" + (found[1] or found[2]).encode("latin-1")
    view = memoryview(body)
    at = body.find(boundary)
    if at < 0 or (at and body[at - 2 : at] != b"\r\n"):
        raise _damaged("its boundary is not in it")
    parts: list[FormPart] = []
    while True:
        at += len(boundary)
        if body[at : at + 2] == b"--":
            return parts
        begin = body.find(b"\r\n", at, at + 100) + 2  # white space may stand behind a boundary
        head_end = body.find(b"\r\n\r\n", begin - 2, begin + MOST_HEAD)
        if begin < 2 or head_end < 0:
            raise _damaged(f"the headers of part {len(parts) + 1} have no end")
        end = body.find(b"\r\n" + boundary, head_end + 2)
        if end < 0:
            raise _damaged(f"part {len(parts) + 1} has no end: the body is cut")
        if len(parts) == MOST_PARTS:
            raise _damaged(f"more than {MOST_PARTS} parts")
        head = body[begin:head_end].decode("utf-8", "replace")
        first = head_end + 4
        parts.append(_part(head, view[first : max(first, end)], len(parts)))
        at = end + 2


def _part(head: str, data: memoryview, index: int) -> FormPart:
    for line in head.split("\r\n"):
        if not line.lower().startswith("content-disposition:"):
            continue
        named = {
            match[1].lower(): re.sub(r"\\(.)", r"\1", match[2]) if match[3] is None else match[3]
            for match in _PARAMETER.finditer(line)
        }
        if "name" in named:
            return FormPart(named["name"], data, named.get("filename"))
    raise _damaged(f"part {index + 1} has no name")


def _damaged(why: str) -> ApiError:
    return ApiError(400, f"the body is not valid multipart/form-data: {why}")
