"""The tiers together are everything, and no test is in both."""

from __future__ import annotations

import random

import pytest

from tests.tiers import MOST, OUTSIDE, ROOT, heavy_names, is_outside, quick, split


@pytest.mark.parametrize("n", [0, 1, MOST, MOST + 1, 1000])
def test_cases_are_spread(n: int) -> None:
    found = quick(range(n))
    assert len(found) == len(set(found)) == min(n, MOST)
    if n:
        assert (found[0], found[-1]) == (0, n - 1)


def test_the_tiers_are_everything_in_any_order() -> None:
    """The quick tier of one run and the rest of another, which are shuffled differently."""
    items = [f"{name}[{i}]" for name, n in (("a", 50), ("b", 3), ("c", 47)) for i in range(n)]
    slow = {item for i, item in enumerate(items) if i % 10 == 0}
    runs = []
    for seed in range(5):
        given = random.Random(seed).sample(items, len(items))
        marks = [item in slow for item in given], [False] * len(given)
        runs.append(split(given, given, *marks))
    for first, _ in runs:
        assert len(first) == MOST + 2 + MOST
        assert not slow & set(first)
        for _, rest in runs:
            assert sorted(first + rest) == sorted(items)


def test_a_test_may_have_every_case_in_the_quick_tier() -> None:
    items = [f"{name}[{i}]" for name in "ab" for i in range(50)]
    first, rest = split(items, items, [False] * 100, [item.startswith("a") for item in items])
    assert len(first) == 50 + MOST
    assert sorted(first + rest) == sorted(items)
    assert not any(item.startswith("a") for item in rest)


def test_what_needs_more_is_outside() -> None:
    assert is_outside(ROOT / "page" / "test_safety.py")
    assert is_outside(ROOT / "real")
    assert is_outside(ROOT / "server" / "test_clients.py")
    heavy = heavy_names(ROOT / "chat" / "template" / "test_template.py")
    assert heavy is not None
    assert {name for name in heavy if name.startswith("test")} == {"test_as_transformers_renders"}
    assert not is_outside(ROOT / "jit" / "test_cache.py")
    assert all((ROOT / folder).is_dir() for folder in OUTSIDE)
