"""``dataclass``: the standard library's, created in a small part of the time.

Before Python 3.13 the standard decorator compiles up to seven functions for each class, one by one,
and all versions search each annotation several times. A plain run creates over 80 classes before it
has read its file; they took a sixth of its CPU time. Here ``__init__`` is compiled when the first
object is made, the fields are collected when they are first asked for, and the other methods are
shared by all classes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import MISSING, Field, FrozenInstanceError
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls=None, /, *, frozen=False, eq=True, kw_only=False):
        """``dataclasses.dataclass`` with only the options used in this package: no ``InitVar``, and
        no ``field(init=False)``.
        """

        def made(cls: type) -> type:
            return _made(cls, frozen, eq, kw_only)

        return made if cls is None else made(cls)


def _made(cls: Any, frozen: bool, eq: bool, kw_only: bool) -> Any:
    own = dict(cls.__dict__)
    bases = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if _is_dataclass(base)]
    if any(params.frozen != frozen for params in bases):
        raise TypeError(f"{cls.__name__} and its bases: expected all frozen, or none")
    given = {name: each for name, each in own.items() if isinstance(each, Field)}
    for name, each in given.items():  # objects without a value have the default, or none
        if each.default is MISSING:
            delattr(cls, name)
        else:
            setattr(cls, name, each.default)
    cls.__doc__ = cls.__doc__ or cls.__name__
    cls.__dataclass_params__ = _Params(frozen, eq, kw_only, given)
    cls.__dataclass_fields__ = _FIELDS
    if "__match_args__" not in own:
        cls.__match_args__ = _MATCH_ARGS
    if frozen and cls.__setattr__ is not _refuse_to_set:  # else it inherits them
        cls.__setattr__ = _refuse_to_set
        cls.__delattr__ = _refuse_to_delete
    cls.__init__ = _late_init(cls, frozen)
    cls.__signature__ = _SIGNATURE
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if _replace is not None:
        cls.__replace__ = _replace
    if eq:
        cls._compared = _COMPARED
        if "__eq__" not in own:
            cls.__eq__ = _eq
        if own.get("__hash__") is None:  # Python sets None if a class defines only __eq__
            cls.__hash__ = _hash if frozen else None
    return cls


_replace = getattr(dataclasses, "_replace", None)  # of ``copy.replace``, from Python 3.13 on


class _Params:
    """``__dataclass_params__``: the decorator's arguments, with the names that the standard library
    uses, and the ``Field`` objects that the class was written with.
    """

    init = repr = match_args = True
    order = unsafe_hash = slots = weakref_slot = False

    def __init__(self, frozen: bool, eq: bool, kw_only: bool, given: dict[str, Any]) -> None:
        self.frozen = frozen
        self.eq = eq
        self.kw_only = kw_only
        self.given = given


class _Late:
    """Descriptor of a class attribute that is computed when it is first read, for the class that
    the decorator was applied to. Two threads may compute it; the results are equal.
    """

    name: str

    def __get__(self, instance: Any, owner: Any) -> Any:
        cls = next((base for base in owner.__mro__ if vars(base).get(self.name) is self), None)
        if cls is None:  # another thread has just set it
            return getattr(owner, self.name)
        found = self.compute(cls)
        setattr(cls, self.name, found)
        return found

    def compute(self, cls: Any) -> Any:
        raise NotImplementedError


class _LateFields(_Late):
    name = "__dataclass_fields__"

    def compute(self, cls: Any) -> dict[str, Any]:
        """Return the fields by name, those of base classes first."""
        params = vars(cls)["__dataclass_params__"]
        found: dict[str, Any] = {}
        for base in cls.__mro__[-1:0:-1]:
            found |= getattr(base, self.name, {})
        for name, kind in cls.__annotations__.items():
            if _is_class_variable(kind):
                continue
            field = params.given.get(name)
            if field is None:
                default = getattr(cls, name, MISSING)
                if default.__class__.__hash__ is None:
                    raise ValueError(f"{cls.__name__}.{name}: mutable default: use default_factory")
                field = dataclasses.field(default=default)
            field.name = name
            field.type = kind
            field._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
            if field.kw_only is MISSING:
                field.kw_only = params.kw_only
            found[name] = field
        return found


class _LateMatchArgs(_Late):
    name = "__match_args__"

    def compute(self, cls: Any) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls) if not field.kw_only)


class _LateCompared(_Late):
    name = "_compared"

    def compute(self, cls: Any) -> Any:
        """Return a function that returns the compared values of an object."""
        names = [field.name for field in dataclasses.fields(cls) if field.compare]
        return attrgetter(*names) if names else type


_FIELDS, _MATCH_ARGS, _COMPARED = _LateFields(), _LateMatchArgs(), _LateCompared()


def _is_class_variable(kind: Any) -> bool:
    if isinstance(kind, str):
        return kind.startswith(("ClassVar", "typing.ClassVar"))
    return kind is ClassVar or getattr(kind, "__origin__", None) is ClassVar


def _is_dataclass(cls: type) -> bool:
    return "__dataclass_params__" in vars(cls)


class _Factory:
    """Marker in the signature of ``__init__``: the default is made by a factory for each object."""

    def __repr__(self) -> str:
        return "<factory>"


_FACTORY = _Factory()


def _late_init(cls: Any, frozen: bool) -> Any:
    """Return an ``__init__`` that at its first call compiles the real one of ``cls``, sets it as
    ``cls.__init__``, and calls it.
    """

    def __init__(self: Any, *given: Any, **named: Any) -> None:
        _compile_init(cls, frozen)(self, *given, **named)

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__module__ = cls.__module__
    return __init__


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
