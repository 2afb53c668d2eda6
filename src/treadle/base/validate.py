"""Checks of single values (integers, numbers, choices, flags, lists, paths) and of keywords' names.

``as_integer``, ``number_between``, ``whole_between``, ``one_of`` and ``text_list`` return None for
a value that does not fit: the settings of ``sampling``, the server's body fields and others word
their own errors. The other functions raise TreadleError with the argument's name.
"""

from __future__ import annotations

import errno
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps
from math import inf, nan
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeGuard, TypeVar

import numpy as np

from treadle.errors import FileError, TreadleError, why

P = ParamSpec("P")
T = TypeVar("T")


def as_integer(value: object) -> int | None:
    """Return ``value`` as an int if it is one, else None. numpy's integers count, True and False do
    not.
    """
    try:
        if isinstance(value, bool):  # an int to Python, but a mistake here
            return None
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def is_number(value: object) -> TypeGuard[float]:
    """Return whether ``value`` is an int or a float, numpy's included; True and False are not."""
    kinds = (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool)


def number_between(value: object, least: float, most: float) -> float | None:
    """Return ``value`` as a float if it is a number from ``least`` to ``most``, else None; None for
    NaN.
    """
    try:
        number = float(value) if is_number(value) else nan
    except OverflowError:  # an int of hundreds of digits
        return None
    return number if least <= number <= most else None


def whole_between(value: object, least: float, most: float) -> int | None:
    """Return ``value`` as an int if it is a whole number from ``least`` to ``most``, else None. 5.0
    is whole, as in JSON.
    """
    if not is_number(value) or not least <= value <= most:
        return None
    has_fraction = isinstance(value, float | np.floating) and not value.is_integer()
    return None if has_fraction else int(value)


def one_of(value: object, choices: Collection[str]) -> str | None:
    """Return ``value`` if it is one of the ``choices``, else None."""
    return value if isinstance(value, str) and value in choices else None


def text_list(value: object) -> list[str] | None:
    """Return a string as a list of one, and a list of strings as it is; None for other values."""
    texts = [value] if isinstance(value, str) else value
    fits = isinstance(texts, list) and all(isinstance(each, str) for each in texts)
    return texts if fits else None  # type: ignore[return-value]


def integer(name: str, value: object) -> int:
    """Return ``value`` as an int; numpy's integers are accepted. Raises TreadleError, with
    ``name``, for other values.
    """
    number = as_integer(value)
    if number is None:
        raise TreadleError(f"{name}={value!r:.40}: expected an integer")
    return number


def ranged(name: str, value: object, least: int, most: float = inf) -> int:
    """Return ``value`` as an int from ``least`` to ``most``. Raises TreadleError, with the
    argument's ``name``, for other values.
    """
    number = integer(name, value)
    if not least <= number <= most:
        expected = f"at least {least}" if most == inf else f"{least} to {most}"
        raise TreadleError(f"{name}={number}: expected {expected}")
    return number


def positive(name: str, value: object, most: float = inf) -> int:
    """Return ``value`` as an int from 1 to ``most``. Raises TreadleError, with the argument's
    ``name``, for other values.
    """
    return ranged(name, value, 1, most)


def flag(name: str, value: object) -> bool:
    """Return ``value`` as a bool. Raises TreadleError, with the argument's ``name``, also for
    strings such as "false".
    """
    if not is_flag(value):
        raise TreadleError(f"{name}={value!r:.40}: expected True or False")
    return bool(value)


def is_flag(value: object) -> bool:
    """Return whether ``value`` is True or False, or an integer 0 or 1."""
    return isinstance(value, bool | int | np.bool_ | np.integer) and value in (0, 1)


def iterated(name: str, values: Any, expected: str = "a list") -> Iterator[Any]:
    """Return an iterator over ``values``. Raises TreadleError, with ``name`` and ``expected``, for
    text, bytes, mappings, and values that cannot be iterated.
    """
    try:
        if isinstance(values, (str, bytes, bytearray, Mapping)):
            raise TypeError
        return iter(values)  # numpy's 0-d arrays have the method, and it raises
    except TypeError:
        raise TreadleError(f"{name}: expected {expected}, found {type(values).__name__}") from None


def listed(name: str, values: Any, expected: str = "a list") -> list[Any]:
    """Return ``values`` as a list. Raises TreadleError, with the argument's ``name`` and the
    ``expected`` type, for text, bytes, mappings, and values that cannot be iterated.
    """
    return list(iterated(name, values, expected))


def token_ids(values: Any) -> list[int]:
    """Return ``values`` as a list of token ids. Raises TreadleError unless it is a list of
    integers.
    """
    ids = listed("token ids", values)
    if all(type(id) is int for id in ids):  # fast path: a prompt may have 100,000 ids
        return ids
    return [integer("a token id", id) for id in ids]


def check_keywords(
    function: str,
    given: Collection[str],
    known: Collection[str],
    elsewhere: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Raise TypeError if ``given`` has a keyword that is not ``known`` to ``function``, with the
    one to use. ``elsewhere``: returns those of other functions, as ``foreign_keywords.hint`` takes
    them.
    """
    for name in given:
        if name not in known:
            from treadle.base.foreign_keywords import hint  # needed for errors only

            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r:.40}"
                f"{hint(name, known, elsewhere())}"
            )


def suggesting(
    elsewhere: Callable[[], Mapping[str, str]] = dict,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of a function without ``**`` parameters: an unexpected keyword raises the
    TypeError of ``check_keywords``.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        code = function.__code__
        named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        known = tuple(name for name in named if name != "self")
        known_set = frozenset(known)

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> T:
            if not given.keys() <= known_set:
                check_keywords(function.__name__, given, known, elsewhere)
            return function(*args, **given)

        # For callers that read the defaults, as the packages of other frameworks do.
        checked.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
        return checked

    return decorate


# -- paths ----------------------------------------------------------------------------------------

Name: TypeAlias = str | os.PathLike[str]

ABSENT = (errno.ENOENT, errno.ENOTDIR)  # no such file


def file_name(path: Name | bytes, of: str = "path") -> Path:
    """Return ``path`` as a Path. An empty name is refused, since ``Path("")`` is the current
    folder.

    Bytes are decoded as file names. ``of`` is the argument's name, for errors. Raises FileError for
    an invalid name, or one in a folder that may not be read; TreadleError for a value that is no
    path.
    """
    try:
        text = os.fsdecode(path)
    except TypeError:
        raise TreadleError(f"{of}={path!r:.80}: expected a path") from None
    if not text:
        raise FileError("an empty name", path="''", expected="a file name")
    if "\0" in text:
        raise FileError("its name holds a NUL byte", path=text)
    try:
        os.stat(text)
    except UnicodeEncodeError:
        raise FileError("its name has no bytes in this system's encoding", path=text) from None
    except OSError as error:  # errors other than ABSENT would make pathlib's queries raise
        if error.errno not in ABSENT:
            raise FileError(why(error), path=text) from error
    return Path(text)
