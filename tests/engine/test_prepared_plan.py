"""Which plan serves a batch, and the rows of its inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from treadle.engine.prepared_plan import plan_sizes, write_rows
from treadle.plan.plan import Buffer

SIZES = (1, 2, 4, 16, 512, 1024)
LIMITS = (700, 128)


def sizes(n_tokens: int, n_outputs: int, limits: tuple[int, int] = LIMITS) -> tuple[int, int]:
    return plan_sizes(n_tokens, n_outputs, SIZES, limits, 512)


def test_few_tokens_have_one_output_or_all() -> None:
    assert [sizes(1, n) for n in (0, 1)] == [(1, 1)] * 2
    assert [sizes(4, n) for n in range(5)] == [(4, 1)] * 2 + [(4, 4)] * 3
    assert sizes(5, 3) == sizes(16, 16) == (16, 16)


def test_many_have_about_as_many_as_are_wanted() -> None:
    assert [sizes(17, n) for n in (0, 1, 3, 16, 17)] == [(512, n) for n in (1, 1, 4, 16, 128)]
    assert sizes(600, 2) == (700, 2)


def test_a_limit_is_the_largest_size() -> None:
    assert sizes(3, 2, (3, 128)) == (3, 2)
    assert sizes(2, 2, (3, 128)) == (2, 2)


@pytest.mark.parametrize(("width", "column"), [(4, 0), (2, 0), (2, 1), (1, 3)])
def test_rows_of_an_input(width: int, column: int) -> None:
    """At their column, with zeros beside them; later rows and other memory stay."""
    held = np.full((5, 4), 7.0, np.float32)

    def write(at: int, data: np.ndarray) -> None:
        held.reshape(-1).view(np.uint8)[at : at + len(data)] = data

    buffer = Buffer("given", 3, 16)
    plan: Any = SimpleNamespace(takes={"given": buffer}, offsets={buffer: 16})
    memory: Any = SimpleNamespace(write=write)
    rows = np.arange(1.0, 1 + 2 * width).reshape(2, width).astype(np.float32)
    write_rows(plan, memory, "given", rows[:, ::-1], column)
    expected = np.full((5, 4), 7.0)
    expected[1:3] = 0
    expected[1:3, column : column + width] = rows[:, ::-1]
    assert np.array_equal(held, expected)
