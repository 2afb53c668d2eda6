"""Table-driven reading of body fields: each row is a field's name and its reader.

Fields in no table are not read: clients send many that are meant for other servers. A known field
that cannot be honoured is an error (``refused``), or a warning in the answer
(``requests/ignored_fields.py``), so nothing that a client requests is dropped silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from treadle.base import validate
from treadle.server.http.api_errors import ApiError

Reader = Callable[[str, Any], Any]  # (name, value) -> value; raises ApiError
Table = Mapping[str, Reader]
T = TypeVar("T")

_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"} | {
    int: "a number",
    float: "a number",
    type(None): "null",
}


def wrong(name: str, value: Any, expected: str) -> ApiError:
    """Return the error (400) for the field ``name``, whose ``value`` has a wrong type or is out of
    range. ``expected``: the allowed values, in words.
    """
    found = _NAMES.get(type(value), type(value).__name__)
    if validate.is_number(value):
        found = f"{value:g}" if isinstance(value, float) else f"{str(value)[:24]}"
    return ApiError(400, f"{name}: expected {expected}, found {found}", param=name)


def read_fields(body: Mapping[str, Any], table: Table, where: str = "") -> dict[str, Any]:
    """Return the values, by name, of those fields of ``table`` that ``body`` has, each as the
    table's reader converts it; null counts as absent. ``where``: a prefix of field names in errors.
    Raises ApiError.
    """
    return {
        name: read(where + name, body[name])
        for name, read in table.items()
        if body.get(name) is not None
    }


def of_type(kind: type[T], expected: str) -> Callable[[str, Any], T]:
    """Return a reader for values of the Python type ``kind``; for other values it raises ApiError,
    which names the ``expected`` type.
    """

    def read(name: str, value: Any) -> T:
        if not isinstance(value, kind):
            raise wrong(name, value, expected)
        return value

    return read


text = of_type(str, "a string")
flag = of_type(bool, "a boolean")
mapping: Callable[[str, Any], dict[str, Any]] = of_type(dict, "an object")
array: Callable[[str, Any], list[Any]] = of_type(list, "an array")


def object_of(table: Table) -> Callable[[str, Any], dict[str, Any]]:
    """Return a reader for a JSON object, whose fields the readers of ``table`` read."""

    def read(name: str, value: Any) -> dict[str, Any]:
        return read_fields(mapping(name, value), table, f"{name}.")

    return read


def whole(low: int, high: int = 2**31 - 1) -> Callable[[str, Any], int]:
    """Return a reader for integers from ``low`` to ``high``; 5.0 counts as an integer, as in
    JSON.
    """

    def read(name: str, value: Any) -> int:
        found = validate.whole_between(value, low, high)
        if found is None:
            raise wrong(name, value, f"a whole number from {low} to {high}")
        return found

    return read


def number(low: float, high: float) -> Callable[[str, Any], float]:
    """Return a reader for numbers from ``low`` to ``high``, as floats."""

    def read(name: str, value: Any) -> float:
        found = validate.number_between(value, low, high)
        if found is None:
            raise wrong(name, value, f"a number from {low:g} to {high:g}")
        return found

    return read


def one_of(*values: str) -> Callable[[str, Any], str]:
    """Return a reader for strings that must be one of ``values``."""

    def read(name: str, value: Any) -> str:
        found = validate.one_of(value, values)
        if found is None:
            raise wrong(name, value, f"one of {', '.join(values)}")
        return found

    return read


def texts(name: str, value: Any) -> list[str]:
    """Return the ``value`` of the field ``name``, a string or an array of strings, as a list.
    Raises ApiError for other values.
    """
    found = validate.text_list(value)
    if found is None:
        raise wrong(name, value, "a string or an array of strings")
    return found


def refused(reason: str, *harmless: Any) -> Reader:
    """Return a reader for a known but unsupported field: it raises ApiError with ``reason``, except
    for the ``harmless`` values, which ask for what happens anyway.
    """

    def read(name: str, value: Any) -> Any:
        if any(value == fine and type(value) is type(fine) for fine in harmless):
            return value
        raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")

    return read
