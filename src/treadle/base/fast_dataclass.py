"""``dataclass``: the standard library's, created in a third of the time.

Before Python 3.13 the standard decorator compiles up to seven functions for each class, one by one.
A plain run creates over 80 classes before it has read its file; they took a sixth of its CPU time.
Here only ``__init__`` is compiled, when the first object is made; the other methods are shared by
all classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, FrozenInstanceError
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NoReturn

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
    # without one, the decorator computes a slow signature
    cls.__doc__ = cls.__doc__ or cls.__name__
    with _bases_as_if_not_frozen(cls, frozen), _annotations_hidden(cls):
        dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)(cls)
    if frozen:
        cls.__dataclass_params__.frozen = True
        if cls.__setattr__ is not _refuse_to_set:  # else it inherits them
            cls.__setattr__ = _refuse_to_set
            cls.__delattr__ = _refuse_to_delete
    cls.__init__ = _late_init(cls, frozen)
    cls.__signature__ = _SIGNATURE
    if "__repr__" not in own:
        cls.__repr__ = _repr
    if eq:
        names = [field.name for field in dataclasses.fields(cls) if field.compare]
        cls._compared = attrgetter(*names) if names else type
        if "__eq__" not in own:
            cls.__eq__ = _eq
        if own.get("__hash__") is None:  # Python sets None if a class defines only __eq__
            cls.__hash__ = _hash if frozen else None
    return cls


@contextmanager
def _bases_as_if_not_frozen(cls: Any, frozen: bool) -> Iterator[None]:
    """Mark the dataclass bases of ``cls`` as not frozen within the block, so that the standard
    decorator can make ``cls`` as one that is not frozen: for a frozen class it would compile two
    methods, which all frozen classes share here. Raises TypeError unless ``cls`` and its bases are
    all frozen or none.
    """
    own = [vars(base)["__dataclass_params__"] for base in cls.__mro__[1:] if _is_dataclass(base)]
    if any(params.frozen != frozen for params in own):
        raise TypeError(f"{cls.__name__} and its bases: expected all frozen, or none")
    for params in own:
        params.frozen = False
    try:
        yield
    finally:
        for params in own:
            params.frozen = frozen


@contextmanager
def _annotations_hidden(cls: Any) -> Iterator[None]:
    """Replace the string annotations of ``cls`` by ``object`` within the block, except those with
    ``ClassVar`` or ``InitVar``: the standard decorator searches each string three times for these.
    The fields get their own types afterwards.
    """
    given = vars(cls).get("__annotations__", {})
    texts = {name: of for name, of in given.items() if isinstance(of, str) and "Var" not in of}
    given |= dict.fromkeys(texts, object)
    try:
        yield
    finally:
        given |= texts
    for name, text in texts.items():
        cls.__dataclass_fields__[name].type = text


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
