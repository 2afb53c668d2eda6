"""The named tuples of this package are those of the standard library, made faster."""

from __future__ import annotations

import copy
import pickle
import typing
from typing import Any

import pytest

from treadle.base import fast_classes
from treadle.base.fast_classes import NamedTuple


class Point(NamedTuple):
    """With a default, a property and a method."""

    x: int
    y: int = 2

    @property
    def total(self) -> int:
        return self.x + self.y

    def moved(self) -> Point:
        return self._replace(x=self.x + 1)


class Standard(typing.NamedTuple):
    """The same of the standard library."""

    x: int
    y: int = 2


def test_tuples_behave_as_the_standard_ones() -> None:
    for _ in range(3 * fast_classes.N_PLAIN):  # plain, then compiled
        point = Point(1, y=3)
        assert isinstance(point, tuple)
        assert point == (1, 3) == Point(x=1, y=3)
        assert Point(1) == (1, 2)
        assert (point.x, point.y, point.total, point.moved()) == (1, 3, 4, (2, 3))
    assert repr(point) == repr(Standard(1, 3)).replace("Standard", "Point")
    assert point._asdict() == {"x": 1, "y": 3}
    assert Point._make([5, 6]) == (5, 6)
    with pytest.raises(TypeError, match="Expected 2 arguments, got 1"):
        Point._make([5])
    with pytest.raises(TypeError, match="'z'"):
        point._replace(z=1)  # type: ignore[call-arg]
    for name in ("_fields", "_field_defaults", "__match_args__", "__slots__"):
        assert getattr(Point, name) == getattr(Standard, name)
    assert not hasattr(point, "__dict__")
    assert Point.__doc__ == "With a default, a property and a method."
    for other in (pickle.loads(pickle.dumps(point)), copy.deepcopy(point)):
        assert (type(other), other) == (Point, point)
    with pytest.raises(AttributeError):
        point.x = 2  # type: ignore[misc]


def test_a_subclass_has_its_own_type() -> None:
    class Heir(Point):
        """A point."""

    for _ in range(2 * fast_classes.N_PLAIN):
        assert (type(Heir(1)), Heir(1)) == (Heir, (1, 2))


def test_a_subclass_keeps_its_own_new() -> None:
    class Base(NamedTuple):
        x: int

    class Doubled(Base):
        def __new__(cls, x: int) -> Any:
            return super().__new__(cls, 2 * x)

    for _ in range(2 * fast_classes.N_PLAIN):
        assert (Doubled(1), Base(1)) == ((2,), (1,))


@pytest.mark.parametrize("given", [(), (1, 2, 3)])
def test_wrong_arguments(given: tuple[Any, ...]) -> None:
    def said(kind: Any, *values: Any, **named: Any) -> str:
        with pytest.raises(TypeError) as caught:
            kind(*values, **named)
        return str(caught.value).partition("__new__")[2]

    assert said(Point, *given) == said(Standard, *given)
    assert said(Point, 1, z=1) == said(Standard, 1, z=1)
    assert said(Point, 1, x=1) == said(Standard, 1, x=1)


def test_a_default_before_a_field_without_one() -> None:
    with pytest.raises(TypeError, match="Wrong: a field without a default"):

        class Wrong(NamedTuple):
            x: int = 1
            y: int  # type: ignore[misc]
