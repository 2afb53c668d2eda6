"""Fewer cases of a kernel test than every spec on every row: each spec on one row or more, and each
row with every kind of spec.

Code for one row and one option of a spec meets other code of that row only where both are in one
kernel, so what goes wrong is a pair of an option and a row. A format's own code, and what a format
and a few other options decide together, is named by the test (``together``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from itertools import product
from typing import TypeVar
from zlib import crc32

import pytest

from treadle.isa.isa import Isa
from treadle.kernels.spec import Spec

S = TypeVar("S", bound=Spec)
LENGTHS = ("k", "head_dim", "head_dim_v", "rope_dims")
SHORT = 16  # values: a vector of 512 bits


def cases(specs: Sequence[Spec], isas: Sequence[Isa]) -> pytest.MarkDecorator:
    """A test of each spec, on those rows that no other spec of the test stands for."""
    return parametrized(covering([*product(specs, isas)]))


def parametrized(pairs: Sequence[tuple[Spec, Isa]]) -> pytest.MarkDecorator:
    """A test of each pair."""
    params = [pytest.param(spec, isa, id=f"{spec.name}-{isa.name}") for spec, isa in pairs]
    return pytest.mark.parametrize(("spec", "isa"), params)


def options(spec: Spec, together: Sequence[str] = ()) -> list[object]:
    """What a row has to meet of a spec: its type with the fields in ``together``; each name and
    switch, by value; each number that has a default, by whether it is another. Of lengths of rows
    and heads also whether they are short, and whether a vector divides them: tails are a row's own.
    """
    kind = type(spec).__name__
    found: list[object] = [(kind, *(getattr(spec, name, None) for name in together))]
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, str | bool):
            found.append((kind, field.name, value))
        elif field.default is not MISSING:
            found.append((kind, field.name, value != field.default))
        if field.name in LENGTHS and isinstance(value, int):
            found.append((kind, field.name, value < SHORT, value % SHORT == 0))
    return found


def covering(
    cases: Sequence[tuple[S, Isa]],
    together: Sequence[str] = (),
    of_row: Callable[[S, object, Isa], object] = lambda spec, option, isa: isa.name,
) -> list[tuple[S, Isa]]:
    """Cases of which none can be left out: each spec, and each pair of an option and a row that the
    given ones have. Specs take rows in turns. ``of_row``: what an option of a spec can tell of a
    row, its name where nothing is known.
    """
    pairs = [
        [spec.name, *((option, of_row(spec, option, isa)) for option in options(spec, together))]
        for spec, isa in cases
    ]
    met = Counter(pair for case in pairs for pair in case)
    left_out = set()
    names = [f"{spec.name} {isa.name}".encode() for spec, isa in cases]
    for i in sorted(range(len(cases)), key=lambda i: crc32(names[i])):
        if all(met[pair] > 1 for pair in pairs[i]):
            met.subtract(pairs[i])
            left_out.add(i)
    return [case for i, case in enumerate(cases) if i not in left_out]
