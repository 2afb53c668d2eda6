"""The dataclasses of this package are those of the standard library, made faster."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import Any, ClassVar

import pytest

from treadle.base import fast_classes
from treadle.base.fast_classes import dataclass


@dataclass(frozen=True)
class Point:
    """Frozen."""

    x: int
    y: int = 2
    note: str = field(default="", repr=False, compare=False)


@dataclass(frozen=True)
class Solid(Point):
    """Inherits."""

    z: int = 3


@dataclass
class Loose:
    """Not frozen."""

    items: list[int] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Thing:
    """Equal to itself alone."""

    x: int


@dataclass(frozen=True)
class Empty:
    """No field."""


@dataclass(frozen=True)
class Own:
    """Its own functions are kept."""

    x: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and abs(self.x) == abs(other.x)

    def __hash__(self) -> int:
        return abs(self.x)

    def __repr__(self) -> str:
        return "own"


@dataclasses.dataclass(frozen=True)
class Outside(Point):
    """A class of somebody else's, by the standard decorator."""

    w: int = 4


def test_values_make_equal() -> None:
    assert Point(1) == Point(1, 2) != Point(1, 3)
    assert Point(1, note="a") == Point(1, note="b")
    assert hash(Point(1)) == hash(Point(1, 2))
    assert Solid(1) != Point(1), "another class"
    assert Solid(1, z=4) == Solid(1, 2, z=4) != Solid(1)
    assert Empty() == Empty()
    assert len({Empty(), Empty()}) == 1
    assert Thing(1) != Thing(1)
    assert len({Thing(1), Thing(1)}) == 2
    assert Outside(1) == Outside(1) != Outside(1, w=5)
    assert {Outside(1): 7}[Outside(1)] == 7
    assert Own(1) == Own(-1)
    assert hash(Own(-1)) == 1
    assert repr(Own(2)) == "own"


def test_what_is_shown() -> None:
    assert repr(Solid(1, note="hidden")) == "Solid(x=1, y=2, z=3)"
    assert repr(Empty()) == "Empty()"
    assert (
        str(inspect.signature(Solid))
        == "(x: 'int', y: 'int' = 2, note: 'str' = '', z: 'int' = 3) -> None"
    )


def test_frozen_ones_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del Solid(1).z
    loose = Loose()
    loose.items = [1]
    assert loose == Loose([1])
    assert Loose().items == []
    with pytest.raises(TypeError, match="unhashable"):
        hash(loose)


def test_frozen_classes_and_others_do_not_inherit_from_each_other() -> None:
    for base, frozen in ((Point, False), (Loose, True)):
        with pytest.raises(TypeError, match="expected all frozen, or none"):
            dataclass(frozen=frozen)(type("Heir", (base,), {}))
        assert vars(base)["__dataclass_params__"].frozen is not frozen
    assert vars(Solid)["__dataclass_params__"].frozen


def test_the_standard_functions_take_them() -> None:
    solid = dataclasses.replace(Solid(1), z=5)
    assert dataclasses.asdict(solid) == {"x": 1, "y": 2, "note": "", "z": 5}
    assert [each.name for each in dataclasses.fields(Outside)] == ["x", "y", "note", "w"]
    assert pickle.loads(pickle.dumps(solid)) == copy.deepcopy(solid) == solid


@dataclass(frozen=True, kw_only=True)
class Named:
    """By name alone."""

    first: int
    made: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.first < 0:
            raise ValueError("negative")


def test_arguments_by_name_factories_and_checks() -> None:
    assert Named(first=1).made == []
    assert Named(first=1).made is not Named(first=1).made, "each has a list of its own"
    assert Named(made=[2], first=1) == Named(first=1, made=[2])
    with pytest.raises(TypeError, match="positional"):
        Named(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'first'"):
        Named()  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        Named(first=-1)


def test_a_signature_is_the_standard_one() -> None:
    own = {"__annotations__": dict(Named.__annotations__), "made": field(default_factory=list)}
    standard: Any = dataclasses.dataclass(frozen=True, kw_only=True)(type("Named", (), own))
    assert str(inspect.signature(Named)) == str(inspect.signature(standard))
    assert Named.__match_args__ == standard.__match_args__


def test_the_signature_is_known_before_the_first_object() -> None:
    @dataclass
    class Made:
        x: int
        y: int = 2

    class Sub(Made):
        """No dataclass itself."""

    class OwnInit(Made):
        def __init__(self, z: int) -> None:
            super().__init__(z)

    assert list(inspect.signature(Made).parameters) == ["x", "y"]
    assert list(inspect.signature(Sub).parameters) == ["x", "y"]
    assert list(inspect.signature(OwnInit).parameters) == ["z"]
    assert OwnInit(5).x == 5
    assert (Sub(1), Sub(1).y) == (Sub(1), 2)
    for _ in range(fast_classes.N_PLAIN):
        assert Made(1, y=3) == Made(1, 3)
    assert list(inspect.signature(Made.__init__).parameters) == ["self", "x", "y"]


def test_plain_and_compiled_objects_are_alike() -> None:
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((1, 2, "", 4), {}), ((1,), {"x": 2})]
    wrong += [((), {}), ((1,), {"w": 2})]

    def errors() -> list[str]:
        @dataclass(frozen=True)
        class Made:
            x: int
            y: list[int] = field(default_factory=list)
            z: str = field(default="a", kw_only=True)

        said = []
        for given, named in wrong:
            with pytest.raises(TypeError) as caught:
                Made(*given, **named)
            said.append(str(caught.value).partition(".Made")[2])
        assert (Made.z, hasattr(Made, "y"), Made(1)) == ("a", False, Made(1, [], z="a"))
        return said

    plain = errors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_classes, "N_PLAIN", 0)
        assert errors() == plain


def test_class_variables_and_mutable_defaults() -> None:
    @dataclass
    class Counted:
        made: ClassVar[int] = 0
        x: int = 1

    assert [each.name for each in dataclasses.fields(Counted)] == ["x"]
    assert Counted(5).made == 0
    with pytest.raises(ValueError, match="use default_factory"):

        @dataclass
        class Wrong:
            x: list[int] = []  # noqa: RUF012
