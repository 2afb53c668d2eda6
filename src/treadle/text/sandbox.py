"""The jinja2 environment that chat templates run in: transformers' settings, and an end to it.

A template comes with a model file from anywhere. jinja2's sandbox keeps it from Python's
insides; the budget here keeps it from running or growing for ever: loops, calls, output and
every operation that can make something large are paid for by their size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from typing import Any, cast

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

BUDGET = 5_000_000  # steps of one rendering: a few seconds at the most; templates need thousands
CALL = 20  # steps that a call is worth, by its time
MAX_COUNT = 10_000  # the largest width, indent or repetition that a method or filter takes
MAX_SIZE = 1 << 24  # characters or elements of any one value that an operator makes
MAX_BITS = 4096  # of a whole number

_left: ContextVar[int] = ContextVar("treadle_template_budget", default=BUDGET)


def render(template: Any, variables: Mapping[str, Any]) -> str:
    """The text of a compiled template, within a fresh budget. Raises what jinja2 raises."""
    token = _left.set(BUDGET)
    try:
        text: str = template.render(**variables)
        return text
    finally:
        _left.reset(token)


def _spend(steps: int) -> None:
    left = _left.get() - steps
    _left.set(left)
    if left < 0:
        raise TemplateRuntimeError(f"the template takes more than {BUDGET} steps")


def _weigh(value: object) -> None:
    """Spend by the size of a value, nested ones included, as often as they are nested."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            _spend(1 + len(item) // 64)
        elif isinstance(item, dict):
            _spend(1 + len(item))
            stack += [*item, *item.values()]
        elif isinstance(item, (list, tuple)):
            _spend(1 + len(item))
            stack += item


def _check_counts(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise TemplateRuntimeError(f"{value} is too large a count (at most {MAX_COUNT})")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """What transformers' apply_chat_template gives a template, with every step counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_finalize,
            cache_size=0,
        )
        self.filters["tojson"] = _tojson
        self.filters = {name: _paid(name, filter) for name, filter in self.filters.items()}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _PlainNamespace

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        return super()._generate(_Meter(self).visit(source), name, filename, defer_init)

    def metered(self, iterable: Iterable[Any]) -> Iterator[Any]:
        """A loop's items, each a step."""
        for item in iterable:
            _spend(1)
            yield item

    def concatenated(self, *parts: object) -> str:
        """The meaning of ``~``."""
        for part in parts:
            _weigh(part)
        return "".join(map(str, parts))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call in a template, paid for; those of texts also by what they could make."""
        _spend(CALL)
        # jinja2 wraps str.format in a function of its own.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_text(getattr(__obj, "__name__", ""), owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator that could make something huge, looked at before it does."""
        _spend(1)
        _CHECKS[operator](left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, (str, list, tuple)):
            _spend(len(result) // 64)
        return result


def _check_text(name: str, owner: str, args: list[Any]) -> None:
    """Pay for a method or filter of text, and refuse what would make a huge one of it."""
    for value in (owner, *args):
        _weigh(value)
    if name in _WIDTHS:
        _check_counts(args)
    elif name in ("replace", "join"):
        # One text comes between all characters or items of another.
        sizes = [len(arg) for arg in args if isinstance(arg, (str, list, tuple))]
        if (len(owner) + 1) * max(sizes, default=0) > MAX_SIZE:
            raise TemplateRuntimeError(f"a text of more than {MAX_SIZE} characters")
    elif name in ("format", "format_map"):
        _check_widths(owner)
        if _NESTED.search(owner) or "*" in owner:  # a width that is itself an argument
            _check_counts(args)


_WIDTHS = ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson")
_NESTED = re.compile(r"\{[^{}]*\{")
_LONG_NUMBER = re.compile(rf"\d{{{len(str(MAX_COUNT)) + 1}}}")


def _check_widths(format: str) -> None:
    if _LONG_NUMBER.search(format):
        raise TemplateRuntimeError(f"too large a number in a format (at most {MAX_COUNT})")


def _check_add(left: Any, right: Any) -> None:
    sized = (str, list, tuple)
    if isinstance(left, sized) and isinstance(right, sized) and len(left) + len(right) > MAX_SIZE:
        raise TemplateRuntimeError(f"a value of more than {MAX_SIZE} elements")


def _check_multiply(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(many, (str, list, tuple)) and isinstance(times, int):
            if len(many) * times > MAX_SIZE:
                raise TemplateRuntimeError(f"a value of more than {MAX_SIZE} elements")
            return
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateRuntimeError(f"a number of more than {MAX_BITS} bits")


def _check_modulo(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_widths(left)
        _check_counts(right if isinstance(right, tuple) and "*" in left else ())
        _weigh(right)


_CHECKS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_add,
    "*": _check_multiply,
    "**": _check_power,
    "%": _check_modulo,
}


def _paid(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, paid for by the size of what goes in and comes out."""

    @wraps(function)  # keeps jinja2's mark of filters that want the environment
    def paid(*args: Any, **kwargs: Any) -> Any:
        _spend(CALL)
        values = [*args, *kwargs.values()]
        texts = [value for value in values if isinstance(value, str)]
        _check_text(name, max(texts, key=len, default=""), values)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            _spend(len(result) // 64)
        return result

    return paid


@pass_context  # so marked, jinja2 leaves it for the time of rendering
def _finalize(context: Context, value: Any) -> Any:
    _weigh(value)
    return value


class _Meter(NodeTransformer):
    """Puts the meter into loops and concatenations, out of a template's own reach."""

    def __init__(self, environment: ChatEnvironment) -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        call.set_lineno(at.lineno)
        call.set_environment(self._environment)
        return call

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = self._call("metered", [cast(nodes.Expr, node.iter)], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return self._call("concatenated", node.nodes, node)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict`` without the class that it is."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _PlainNamespace(Namespace):
    """``namespace`` that takes no names with an underscore in front."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no attribute {name!r}")


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


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
