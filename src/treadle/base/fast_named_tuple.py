"""``NamedTuple``: typing's, created in a fifth of the time.

The standard one compiles a ``__new__`` for each class. A plain run creates a dozen classes, most of
them for a few tuples. Here ``__new__`` is compiled for classes of which many are made.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

N_PLAIN = 16  # tuples of a class that are made without a compiled ``__new__``

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _Maker(type):
        """Metaclass that makes of a class with ``NamedTuple`` as its base a subclass of tuple."""

        def __new__(cls, name, bases, own):
            """Return the new class."""
            return _made(name, own) if bases else super().__new__(cls, name, bases, own)

    class NamedTuple(metaclass=_Maker):
        """Base of the classes, as ``typing.NamedTuple``; without type parameters."""


def _made(name: str, own: dict[str, Any]) -> type:
    fields = tuple(own["__annotations__"])
    defaults = {field: own.pop(field) for field in fields if field in own}
    if tuple(defaults) != fields[len(fields) - len(defaults) :]:
        raise TypeError(f"{name}: a field without a default follows one with a default")
    places = {field: _FIELD(i, f"Field {i}") for i, field in enumerate(fields)}
    own = {**_METHODS, "__new__": _late_new(name, fields, defaults), **places, **own}
    own |= {"__slots__": (), "_fields": fields, "__match_args__": fields}
    own["_field_defaults"] = defaults
    return type(name, (tuple,), own)


def _make(cls: Any, values: Iterable[Any]) -> Any:
    """Return a tuple of ``values``, one for each field."""
    made = tuple.__new__(cls, values)
    if len(made) != len(cls._fields):
        raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
    return made


def _replace(self: Any, /, **named: Any) -> Any:
    """Return a copy with the given fields replaced. Raises TypeError for an unknown field."""
    made = self._make(map(named.pop, self._fields, self))
    if named:
        raise TypeError(f"Got unexpected field names: {[*named]!r}")
    return made


def _asdict(self: Any) -> dict[str, Any]:
    """Return the fields by name."""
    return dict(zip(self._fields, self, strict=True))


def _repr(self: Any) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({values})"


def _getnewargs(self: Any) -> tuple[Any, ...]:
    return tuple(self)


_METHODS = {
    "_make": classmethod(_make),
    "_replace": _replace,
    "_asdict": _asdict,
    "__repr__": _repr,
    "__getnewargs__": _getnewargs,
}
# The descriptor of a field: there is no public name for it.
_FIELD: Any = type(vars(namedtuple("_Field", "x"))["x"])


def _late_new(name: str, fields: tuple[str, ...], defaults: dict[str, Any]) -> Any:
    """Return a ``__new__`` for the class ``name`` with ``fields`` and their ``defaults``. After
    ``N_PLAIN`` tuples it sets the standard library's in its place. Wrong arguments are left to that
    one, for Python's own errors.
    """
    n_left = N_PLAIN

    def __new__(cls: Any, *given: Any, **named: Any) -> Any:
        nonlocal n_left
        n_left -= 1
        values = [*given]
        n_named = 0
        for field in fields[len(given) :]:
            if field in named:
                n_named += 1
                values.append(named[field])
            elif field in defaults:
                values.append(defaults[field])
        if n_left >= 0 and len(values) == len(fields) and n_named == len(named):
            return tuple.__new__(cls, values)
        compiled: Any = namedtuple(name, fields, defaults=defaults.values()).__new__
        for base in cls.__mro__:  # not a subclass with its own; none if another thread set it
            if getattr(vars(base).get("__new__"), "__func__", None) is __new__:
                base.__new__ = staticmethod(compiled)
        return compiled(cls, *given, **named)

    return __new__
