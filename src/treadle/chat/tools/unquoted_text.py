"""Regular expressions, in llguidance's notation, of strings written without JSON's quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from treadle.grammar.json_schema import FORMATS

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
# Further formats that llguidance knows in JSON, as far as they are short to write.
_OTHERS = {
    "uuid": ("^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",),
    "ipv4": (rf"^{_BYTE}(?:\.{_BYTE}){{3}}$",),
}
# The parts of a pattern that matter here: an escape, a class, a bracket, a choice, an anchor.
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|^$]", re.S)
_FLAGS = re.compile(r"\(\?([a-z]+)\)")
_ANCHORS = ("^", "$", r"\b", r"\B", r"\A", r"\z", r"\Z")
# In a schema's pattern, digits and letters are ASCII; between slashes, line breaks are escaped.
_SPELLED = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[a-zA-Z0-9_]",
    r"\W": "[^a-zA-Z0-9_]",
    "\\\n": r"\n",
    "\n": r"\n",
    "/": r"\/",
}


def limits(schema: Any) -> list[str]:
    """Return regular expressions between slashes that a string of this schema must match as a
    whole. A pattern is left out if it has an anchor elsewhere than at an end of an alternative.
    """
    found = _patterns(schema) if isinstance(schema, Mapping) else ()
    return [f"/{regex}/" for regex in map(_spelled, found) if fits(f"/{regex}/")]


def without(mark: str) -> str:
    """Return a regular expression of texts that do not contain ``mark``. If the mark's first
    character occurs again inside it, the part before that is excluded too.

    The result is not a complement: whether an intersection with a complement is empty is found by
    search, which fails for long texts.
    """
    first = re.escape(mark[0])
    rest = mark.lstrip(mark[0])
    n = len(mark) - len(rest)
    rest = rest.partition(mark[0])[0]
    assert rest
    run = f"{first}{{{n},}}"
    begun = [f"{run}{re.escape(rest[:i])}" for i in range(1, len(rest))]
    ways = [f"{first}{{1,{n - 1}}}[^{first}]"] if n > 1 else []
    ways += [
        f"{part}[^{first}{re.escape(char)}]" for part, char in zip([run, *begun], rest, strict=True)
    ]
    parts = f"(?:{'|'.join(begun)})*" if begun else ""
    other = f"[^{first}]|{parts}(?:{'|'.join(ways)})"
    return f"/{_spelled(f'(?:{other})*{parts}{first}*')}/"


def not_beginning(mark: str) -> str:
    """Return the regular expression of texts that do not begin with ``mark``."""
    ends = [re.escape(mark[:i]) for i in range(1, len(mark))]
    ways = [f"{re.escape(mark[:i])}[^{re.escape(mark[i])}](?s:.*)" for i in range(len(mark))]
    return f"/(?:{_spelled('|'.join([*ends, *ways]))})?/"


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = (schema.get(key) for key in ("minLength", "maxLength"))
    if least or most is not None:
        yield f"(?s:.{{{int(least or 0)},{'' if most is None else int(most)}}})"
    name = schema.get("format")
    pattern = schema.get("pattern")
    patterns = {**FORMATS, **_OTHERS}.get(name, ()) if isinstance(name, str) else ()
    for each in (*patterns, *([pattern] if isinstance(pattern, str) else [])):
        whole = _whole(each)
        if whole is not None:
            yield whole
    every = schema.get("allOf")
    for part in every if isinstance(every, list) else ():
        if isinstance(part, Mapping):
            yield from _patterns(part)


def _whole(pattern: str) -> str | None:
    """Convert a pattern that may match anywhere in a text to one that matches the whole text; None
    if it has an anchor elsewhere than at an end of an alternative.
    """
    made = []
    flags = _FLAGS.match(pattern)
    for choice in _choices(pattern[flags.end() :] if flags else pattern):
        found = [(m.start(), m.end()) for m in _PARTS.finditer(choice) if m.group() in _ANCHORS]
        begins = (0, 1) in found
        ends = (len(choice) - 1, len(choice)) in found
        if len(found) > begins + ends:
            return None
        inner = choice[begins : len(choice) - ends]
        made.append(f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}")
    return f"(?{flags[1] if flags else ''}:{'|'.join(made)})"


def _choices(pattern: str) -> list[str]:
    """Split a pattern at its top-level ``|``."""
    made = []
    depth = 0
    start = 0
    for found in _PARTS.finditer(pattern):
        part = found.group()
        depth += (part == "(") - (part == ")")
        if part == "|" and not depth:
            made.append(pattern[start : found.start()])
            start = found.end()
    return [*made, pattern[start:]]


def _spelled(regex: str) -> str:
    """Return a regular expression escaped for use between two slashes."""
    return re.sub(r"\\.|[\n/]", lambda m: _SPELLED.get(m[0], m[0]), regex, flags=re.S)


@lru_cache(1024)
def fits(*regexes: str) -> bool:
    """Whether llguidance accepts the intersection of these regular expressions: it can parse them
    and finds a matching text within its limits. A minimum length of some thousand characters
    exceeds them.
    """
    from llguidance import LLMatcher

    source = LLMatcher.grammar_from_lark(f"start: T\nT: {' & '.join(regexes)}")
    return not LLMatcher(_bytes(), source, log_level=0).is_error()


@lru_cache(1)
def _bytes() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
