"""Weight formats by ggml's type number; a format's module is imported on first use.

::

    format.py          Format (a row of FORMATS), and Codes, its integer codes for kernels
    ggml_types.py      number, name and block size of every ggml tensor type
    numbers.py         builders of numpy (de)quantisers from a format's ``read`` and ``write``
    packing.py         codes of less than a byte, packed and unpacked in numpy
    rounding.py        rounding as in ggml's C quantisers
    floats.py          F32, F16, BF16, F64
    blocks32.py        Q4_0, Q4_1, Q5_0, Q5_1, Q8_0
    k_low.py           Q2_K, Q3_K
    k_quants.py        Q4_K, Q5_K, Q6_K
    k_search.py        scale search of the K formats: the method
    k_signed.py        the same search for super-blocks without minimums
    k_offset.py        the same search for super-blocks with minimums
    iq1.py             IQ1_S, IQ1_M
    iq2.py             IQ2_XXS, IQ2_XS, IQ2_S
    iq3.py             IQ3_XXS, IQ3_S
    iq4.py             IQ4_NL, IQ4_XS
    grids.py           codebooks of IQ1, IQ2 and IQ3
    signs.py           sign bytes of IQ2 and IQ3
    nearest.py         nearest-point search in a codebook
    scale_search.py    scale search of the IQ formats, and of ik_llama.cpp's with code tables
    ternary.py         TQ1_0, TQ2_0, Q2_0, Q1_0
    fp4.py             MXFP4, NVFP4
    ik_codes.py        code tables and packings of ik_llama.cpp's formats
    ik_blocks.py       ik_llama.cpp's IQ2_K to IQ6_K: a scale per block
    ik_rows.py         ik_llama.cpp's IQ2_KS to IQ5_KS and IQ4_KSS: a scale per row
    ik_trellis.py      ik_llama.cpp's IQ1_KT to IQ4_KT: values computed from their index
    trellis_search.py  scale and index search of these trellis formats
    mlx.py             MLX's affine formats
    kernel_bits.py     kernels: permutations of bits and bytes
    kernel_grids.py    kernels: points of a codebook, and their signs
    kernel_scales.py   kernels: scales and minimums
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from treadle.errors import UnsupportedError
from treadle.formats.ggml_types import OTHERS, REMOVED, SUPPORTED, GGMLType

if TYPE_CHECKING:
    from treadle.formats.format import Format as Format

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


class _Formats(MutableMapping[int, "Format"]):
    """Mapping from ggml type number to ``Format``: the supported formats, and those that a program
    adds.
    """

    def __init__(self) -> None:
        self.made: dict[int, Format] = {}  # added, or imported
        self._own: dict[int, Format] = {}  # imported
        self._late = dict(SUPPORTED)

    def __getitem__(self, ggml_id: int) -> Format:
        if ggml_id not in self.made:
            kind, module = self._late[ggml_id]
            self._own[ggml_id] = getattr(import_module(f".{module}", __name__), kind.name)
            self.made[ggml_id] = self._own[ggml_id]
        return self.made[ggml_id]

    def __setitem__(self, ggml_id: int, fmt: Format) -> None:
        self.made[ggml_id] = fmt
        if self._own.get(ggml_id) is fmt:  # a format of ours that was removed is back
            self._late[ggml_id] = SUPPORTED[ggml_id]

    def __delitem__(self, ggml_id: int) -> None:
        if ggml_id not in self:
            raise KeyError(ggml_id)
        self.made.pop(ggml_id, None)
        self._late.pop(ggml_id, None)

    def __contains__(self, ggml_id: object) -> bool:
        return ggml_id in self._late or ggml_id in self.made

    def has_codes(self, ggml_id: int) -> bool:
        """Return whether weights of this type are integer codes (``Format.codes``), not floats;
        False for a type that is not supported. Imports no format.
        """
        if (fmt := self.made.get(ggml_id)) is not None:
            return fmt.codes is not None
        return ggml_id in self._late and self._late[ggml_id][1] != "floats"

    def is_changed(self) -> bool:
        """Return whether a program has added, replaced or removed formats."""
        added = any(self._own.get(number) is not fmt for number, fmt in [*self.made.items()])
        return added or len(self._late) < len(SUPPORTED)

    def __iter__(self) -> Iterator[int]:
        return iter(dict.fromkeys((*self._late, *self.made)))

    def __len__(self) -> int:
        return len({*self._late, *self.made})


def __getattr__(name: str) -> Any:
    if name == "Format":  # imported on first use: a warm start reads sizes alone
        from treadle.formats.format import Format

        return Format
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


FORMATS = _Formats()
# Every ggml type by number. The reader checks sizes with it, so that files in formats that treadle
# cannot compute with can still be opened and inspected.
GGML_TYPES = OTHERS | {number: kind for number, (kind, _) in SUPPORTED.items()}
_NUMBERS = {kind.name: number for number, (kind, _) in SUPPORTED.items()}


def by_name(name: str) -> Format:
    """Return the format called ``name`` (case-insensitive), MLX's formats included, which have no
    ggml type number. Raises UnsupportedError, listing the known names.
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
    """Return the ggml type number of ``name`` (case-insensitive), also of types that treadle cannot
    compute with; -1 if ggml has no such type.
    """
    kinds: dict[int, Format | GGMLType] = {**GGML_TYPES, **FORMATS.made}
    return next((n for n, kind in kinds.items() if kind.name == name.upper()), -1)


def type_of(ggml_id: int) -> GGMLType | None:
    """Return the name and sizes of the type with ggml's number ``ggml_id``: weights and bytes of a
    block, and bytes before the first block of a row. None if the number is unknown.
    """
    fmt = FORMATS.made.get(ggml_id)
    if fmt is not None:
        return GGMLType(fmt.name, fmt.block, fmt.dtype.itemsize, fmt.head_bytes)
    return GGML_TYPES.get(ggml_id)
