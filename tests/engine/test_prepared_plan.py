"""Which plan serves a batch."""

from __future__ import annotations

from treadle.engine.prepared_plan import plan_sizes

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
