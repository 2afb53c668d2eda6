"""Jinja2 environment of chat templates: transformers' settings, in jinja2's sandbox.

The sandbox keeps a template from Python's internals. It limits neither time nor memory:
``renderer`` does that, for every template that comes with a model file.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, meta, nodes
from jinja2.exceptions import TemplateError as JinjaError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from treadle.errors import TemplateError, printable

MAX_MESSAGE = 1000  # characters of an error message: a template chooses its text
_FILE_NAME = "<template>"  # jinja2's name for templates from strings
_SPEAKING = (JinjaError, ArithmeticError, LookupError, SyntaxError, TypeError, ValueError)


def render(source: str, variables: Mapping[str, Any], now: datetime) -> str:
    """Return the text that a template renders with ``variables``; ``now``: the time that it reads.

    Raises TemplateError, with the line if known, and MemoryError.
    """
    with _telling(source):
        return compiled(source).render({"strftime_now": now.strftime, **variables})


def names(source: str) -> list[str]:
    """Return the names of variables that a template reads and does not set. Raises as ``render``
    does.
    """
    with _telling(source):
        found = meta.find_undeclared_variables(_environment().parse(source))
        return sorted(found - {"strftime_now"})


def check(source: str) -> None:
    """Raise TemplateError, with the line, for a template that does not compile."""
    with _telling(source):
        compiled(source)


@lru_cache(maxsize=8)
def compiled(source: str) -> Template:
    """Return a template compiled by jinja2. Raises what jinja2 and Python's compiler raise."""
    return _environment().from_string(source)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Sandbox in which templates may append to lists and pop from them, as Kimi's do. A template is
    given copies, so this is safe.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], cache_size=0
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


@contextmanager
def _telling(source: str) -> Iterator[None]:
    """Convert every exception in the block, which runs a template, to TemplateError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as e:
        text = e.msg if isinstance(e, SyntaxError) else str(e)
        message = text if isinstance(e, _SPEAKING) else f"{type(e).__name__}: {text}"
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]}…"
        raise TemplateError(f"chat template{_line(e, source)}: {printable(message)}") from None


def _line(error: BaseException, source: str) -> str:
    """Return ", line N" of the template, from syntax errors and jinja2's rewritten tracebacks."""
    line = getattr(error, "lineno", None)
    if isinstance(error, SyntaxError):  # from Python, about the code that jinja2 generated
        line = _template_line(source, line)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == _FILE_NAME:
            line = frame.lineno
    return f", line {line}" if line else ""


def _template_line(source: str, line: int | None) -> int | None:
    """Return the template line that a line of jinja2's generated code was made from.

    The code ends with a table of lines, "template=code&..."; it is not run here.
    """
    program = _environment().compile(source, raw=True)
    *_, table = ["", *re.findall(r"^debug_info = '([\d=&]*)'$", program, re.MULTILINE)]
    pairs = (pair.split("=") for pair in table.split("&") if pair)
    return max((int(ours) for ours, made in pairs if int(made) <= (line or 0)), default=None)


class _Generation(Extension):
    """The ``{% generation %}`` tag, which marks the assistant's text for training.

    Here it renders its body in a scope of its own, as in transformers: variables set inside are
    unknown after it.
    """

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: object) -> None:
    raise JinjaError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
