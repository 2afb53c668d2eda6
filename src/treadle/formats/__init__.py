"""Weight formats by ggml's type number; a format's module is imported on first use."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

from treadle.errors import UnsupportedError
from treadle.formats.format import Format
from treadle.formats.ggml_types import OTHERS, REMOVED, SUPPORTED, GGMLType

__all__ = [
    "FORMATS",
    "GGML_TYPES",
    "REMOVED",
    "Format",
    "GGMLType",
    "by_name",
    "number_of",
    "type_of",
]


class _Formats(MutableMapping[int, Format]):
    """The formats that treadle computes with, and those that a program adds."""

    def __init__(self) -> None:
        self.made: dict[int, Format] = {}  # added, or imported
        self._late = dict(SUPPORTED)

    def __getitem__(self, ggml_id: int) -> Format:
        if ggml_id not in self.made:
            kind, module = self._late[ggml_id]
            self.made[ggml_id] = getattr(import_module(f".{module}", __name__), kind.name)
        return self.made[ggml_id]

    def __setitem__(self, ggml_id: int, fmt: Format) -> None:
        self.made[ggml_id] = fmt

    def __delitem__(self, ggml_id: int) -> None:
        if ggml_id not in self:
            raise KeyError(ggml_id)
        self.made.pop(ggml_id, None)
        self._late.pop(ggml_id, None)

    def __contains__(self, ggml_id: object) -> bool:
        return ggml_id in self._late or ggml_id in self.made

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys((*self._late, *self.made)))

    def __len__(self) -> int:
        return len({*self._late, *self.made})


FORMATS = _Formats()
# Every ggml type by number. The reader checks sizes with it, so that files in formats that treadle
# cannot compute with can still be opened and inspected.
GGML_TYPES = OTHERS | {number: kind for number, (kind, _) in SUPPORTED.items()}
_NUMBERS = {kind.name: number for number, (kind, _) in SUPPORTED.items()}


def by_name(name: str) -> Format:
    """Return the format ``name`` (case-insensitive). UnsupportedError lists the known formats.

    MLX formats have no ggml type number; they are built from their names.
    """
    upper = name.upper()
    number = _NUMBERS.get(upper)
    if number is not None and number in FORMATS:
        return FORMATS[number]
    for fmt in FORMATS.made.values():
        if fmt.name == upper:
            return fmt
    from treadle.formats.mlx import named

    if (result := named(upper)) is not None:
        return result
    raise UnsupportedError(f"unknown weight format {name!r}; choose one of {', '.join(_NUMBERS)}")


def number_of(name: str) -> int:
    """Return the ggml type number of ``name`` (case-insensitive), supported or not; -1 if none."""
    kinds: dict[int, Format | GGMLType] = {**GGML_TYPES, **FORMATS.made}
    return next((n for n, kind in kinds.items() if kind.name == name.upper()), -1)


def type_of(ggml_id: int) -> GGMLType | None:
    """Return name and block size of a ggml type; None if it is unknown."""
    fmt = FORMATS.made.get(ggml_id)
    if fmt is not None:
        return GGMLType(fmt.name, fmt.block, fmt.dtype.itemsize, fmt.head_bytes)
    return GGML_TYPES.get(ggml_id)
