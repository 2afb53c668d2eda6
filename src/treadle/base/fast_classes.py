"""``dataclass``, ``NamedTuple`` and ``cached_property``: as those of the standard library, for a
faster start and without locks.

Before Python 3.13 the standard ``dataclass`` compiles up to seven functions for each class, one by
one, and ``NamedTuple`` one. A plain run creates over 80 classes before it has read its file; they
took a sixth of its CPU time. Here the methods are shared by all classes, and only the ``__init__``
or ``__new__`` of a class with many objects is compiled: a dataclass is created in an eighth of the
time, a named tuple in a fifth.
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Iterable
from dataclasses import MISSING, FrozenInstanceError
from operator import attrgetter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

# Objects of a class that are made without a compiled ``__init__`` or ``__new__``. To compile that
# costs as much as twenty of them.
N_PLAIN = 16

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, kw_only=False):
        """``dataclasses.dataclass`` with only the options used in this package: no ``InitVar``, no
        ``KW_ONLY``, and no ``field(init=False)``.
        """

        def made(cls: type) -> type:
            return _made(cls, frozen, eq, kw_only)

        return made if cls is None else made(cls)


def _made(cls: Any, frozen: bool, eq: bool, kw_only: bool) -> Any:
    own = dict(cls.__dict__)
    cls.__doc__ = cls.__doc__ or cls.__name__
    _check_bases(cls, frozen)
    fields = _fields(cls, kw_only)
    # The standard library's functions read these two.
    cls.__dataclass_fields__ = fields
    cls.__dataclass_params__ = SimpleNamespace(
        init=True, repr=True, eq=eq, order=False, unsafe_hash=False, frozen=frozen
    )
    positional = tuple(name for name, field in fields.items() if not field.kw_only)
    cls.__match_args__ = positional  # type: ignore[misc]
    if frozen and cls.__setattr__ is not _refuse_to_set:  # else it inherits them
        cls.__setattr__ = _refuse_to_set
        cls.__delattr__ = _refuse_to_delete
    cls.__init__ = _late_init(cls, frozen)
    cls.__signature__ = _SIGNATURE
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if eq:
        names = [name for name, field in fields.items() if field.compare]
        cls._compared = attrgetter(*names) if names else type
        if "__eq__" not in own:
            cls.__eq__ = _eq
        if own.get("__hash__") is None:  # Python sets None if a class defines only __eq__
            cls.__hash__ = _hash if frozen else None
    return cls


def _check_bases(cls: Any, frozen: bool) -> None:
    """Raise TypeError unless ``cls`` and its bases are all frozen or none."""
    bases = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if _is_dataclass(base)]
    if any(params.frozen != frozen for params in bases):
        raise TypeError(f"{cls.__name__} and its bases: expected all frozen, or none")


def _fields(cls: Any, kw_only: bool) -> dict[str, Any]:
    """Return the fields of a dataclass, ``dataclasses.Field`` by name: those of the bases, then
    those that ``cls`` annotates. ``kw_only``: these are keyword-only. A field's default becomes the
    class attribute, as the standard decorator has it.
    """
    fields: dict[str, Any] = {}
    for base in cls.__mro__[:0:-1]:
        fields |= vars(base).get("__dataclass_fields__", {})
    for name, of in cls.__annotations__.items():
        if "ClassVar" in (of if isinstance(of, str) else repr(of)):
            continue
        default = getattr(cls, name, MISSING)
        is_field = isinstance(default, dataclasses.Field)
        field: Any = default if is_field else dataclasses.field(default=default)
        field.name = name
        field.type = of
        field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
        if field.kw_only is MISSING:
            field.kw_only = kw_only
        if type(field.default).__hash__ is None:
            what = type(field.default).__name__
            raise ValueError(f"{cls.__name__}.{name}: a default of {what}: use default_factory")
        if field.default is not MISSING:
            setattr(cls, name, field.default)
        elif is_field:
            delattr(cls, name)
        fields[name] = field
    return fields


def _is_dataclass(cls: type) -> bool:
    return "__dataclass_params__" in vars(cls)


class _Factory:
    """Marker in the signature of ``__init__``: the default is made by a factory for each object."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _late_init(cls: Any, frozen: bool) -> Any:
    """Return an ``__init__`` that reads the fields of ``cls``; ``frozen``: it is a frozen
    dataclass. After ``N_PLAIN`` objects it compiles a faster one and sets that as ``cls.__init__``.
    Wrong arguments are left to the compiled one, for Python's own errors.
    """
    n_left = N_PLAIN

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        nonlocal n_left
        n_left -= 1
        values = _values(cls, given, named) if n_left >= 0 else None
        if values is None:
            _compile_init(cls, frozen)(self, *given, **named)
            return
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if hasattr(cls, "__post_init__"):
            self.__post_init__()

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__module__ = cls.__module__
    return __init__


def _values(cls: Any, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any] | None:
    """Return the value of each field, by name, for the arguments ``given`` and ``named`` of
    ``__init__``; None for wrong arguments.
    """
    values: dict[str, Any] = {}
    n_given = n_named = 0
    for name, field in cls.__dataclass_fields__.items():
        if n_given < len(given) and not field.kw_only:
            values[name] = given[n_given]
            n_given += 1
            if name in named:
                return None
        elif name in named:
            values[name] = named[name]
            n_named += 1
        elif field.default is not MISSING:
            values[name] = field.default
        elif field.default_factory is not MISSING:
            values[name] = field.default_factory()
        else:
            return None
    return values if (n_given, n_named) == (len(given), len(named)) else None


def _compile_init(cls: Any, frozen: bool) -> Any:
    made = _init(cls, frozen)
    cls.__init__ = made
    return made


class _Signature:
    """Descriptor for ``__signature__`` of a dataclass, computed when ``inspect`` or ``help`` reads
    it.
    """

    def __get__(self, instance: Any, owner: Any) -> Any:
        from inspect import signature

        owner = next(base for base in owner.__mro__ if "__init__" in vars(base))
        if not _is_dataclass(owner):  # a subclass with its own
            raise AttributeError("__signature__")
        made = signature(_init(owner, owner.__dataclass_params__.frozen))
        return made.replace(parameters=list(made.parameters.values())[1:])  # without self


_SIGNATURE = _Signature()


def _init(cls: Any, frozen: bool) -> Any:
    """Return the compiled ``__init__`` of ``cls``, from its fields; with ``frozen`` it sets them by
    ``object.__setattr__``.
    """
    names: dict[str, Any] = {"_set": object.__setattr__, "_FACTORY": _FACTORY}
    positional = ["self"]
    keyword = list[str]()
    body = list[str]()
    for field in dataclasses.fields(cls):
        name = value = field.name
        default = f"_default_{name}"
        if field.default_factory is not MISSING:
            names[default] = field.default_factory
            value = f"{default}() if {name} is _FACTORY else {name}"
            argument = f"{name}=_FACTORY"
        elif field.default is not MISSING:
            names[default] = field.default
            argument = f"{name}={default}"
        else:
            argument = name
        (keyword if field.kw_only else positional).append(argument)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    arguments = [*positional, *(["*", *keyword] if keyword else [])]
    exec(f"def __init__({', '.join(arguments)}):\n " + "\n ".join(body or ["pass"]), names)
    result = names["__init__"]
    result.__qualname__ = f"{cls.__qualname__}.__init__"
    result.__module__ = cls.__module__
    types = {field.name: field.type for field in dataclasses.fields(cls)}
    result.__annotations__ = types | {"return": None}
    return result


def _refuse_to_set(self: Any, name: str, value: Any) -> NoReturn:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(self: Any, name: str) -> NoReturn:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


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


if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:

    class _Maker(type):
        """Metaclass that makes of a class with ``NamedTuple`` as its base a subclass of tuple."""

        def __new__(cls, name, bases, own):
            """Return the new class."""
            return _made_tuple(name, own) if bases else super().__new__(cls, name, bases, own)

    class NamedTuple(metaclass=_Maker):
        """Base of the classes, as ``typing.NamedTuple``; without type parameters."""


def _made_tuple(name: str, own: dict[str, Any]) -> type:
    fields = tuple(own["__annotations__"])
    defaults = {field: own.pop(field) for field in fields if field in own}
    if tuple(defaults) != fields[len(fields) - len(defaults) :]:
        raise TypeError(f"{name}: a field without a default follows one with a default")
    places = {field: _ITEM(i, f"Field {i}") for i, field in enumerate(fields)}
    own = {**_METHODS, "__new__": _late_new(name, fields, defaults), **places, **own}
    own |= {"__slots__": (), "_fields": fields, "__match_args__": fields}
    own["_field_defaults"] = defaults
    return type(name, (tuple,), own)


def _make_tuple(cls: Any, values: Iterable[Any]) -> Any:
    """Return a tuple of ``values``, one for each field."""
    made = tuple.__new__(cls, values)
    if len(made) != len(cls._fields):
        raise TypeError(f"Expected {len(cls._fields)} arguments, got {len(made)}")
    return made


def _replace_tuple(self: Any, /, **named: Any) -> Any:
    """Return a copy with the given fields replaced. Raises TypeError for an unknown field."""
    made = self._make(map(named.pop, self._fields, self))
    if named:
        raise TypeError(f"Got unexpected field names: {[*named]!r}")
    return made


def _asdict(self: Any) -> dict[str, Any]:
    """Return the fields by name."""
    return dict(zip(self._fields, self, strict=True))


def _repr_tuple(self: Any) -> str:
    values = ", ".join(f"{name}={value!r}" for name, value in zip(self._fields, self, strict=True))
    return f"{type(self).__name__}({values})"


def _getnewargs(self: Any) -> tuple[Any, ...]:
    return tuple(self)


_METHODS = {
    "_make": classmethod(_make_tuple),
    "_replace": _replace_tuple,
    "_asdict": _asdict,
    "__repr__": _repr_tuple,
    "__getnewargs__": _getnewargs,
}
# The descriptor of a field: there is no public name for it.
_ITEM: Any = type(vars(namedtuple("_Field", "x"))["x"])


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


if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:  # lowercase as in functools
        """``functools.cached_property`` as of Python 3.12. Earlier versions share one lock per
        class: objects wait for each other, and a child forked meanwhile waits forever. Here two
        threads may compute a value; all get the first.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function = function
            self.__doc__ = function.__doc__
            self.name = ""

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            made = instance.__dict__  # takes precedence over this descriptor
            return (
                made[self.name]
                if self.name in made
                else made.setdefault(self.name, self.function(instance))
            )
