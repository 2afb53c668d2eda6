"""Parameters of functions that are tools: their schemas, and what is made of a call's arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum, auto
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    Union,
)

import pytest

import treadle
from treadle.errors import TreadleError
from treadle.speech.annotations import Schemas, to_json, value_of
from treadle.speech.functions import result_of, tool_of
from treadle.text.json_schema import kept_schema


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Unit(StrEnum):
    C = auto()
    F = auto()


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Point(Enum):
    HERE = (0, 0)
    THERE = (1, 1)


@dataclass(frozen=True)
class Place:
    name: str
    colour: Colour = Colour.RED
    tags: list[str] = field(default_factory=list)
    hidden: int = field(init=False, default=3)


class Seat(NamedTuple):
    row: int
    side: Literal["left", "right"] = "left"


class Options(TypedDict):
    unit: Unit
    at: NotRequired[Place]


@dataclass
class Node:
    value: int
    next: list[Node] = field(default_factory=list)


Id = NewType("Id", int)
OPTIONAL, UNION = Optional[Colour], Union[Colour, Place]  # noqa: UP007, UP045  # other classes
MIXED = Literal["all", 1, True, None, Colour.BLUE]
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "colour": {"enum": ["red", "blue"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name"],
    "additionalProperties": False,
}
OSLO = Place("Oslo", Colour.BLUE, ["a"])
OSLO_JSON = {"name": "Oslo", "colour": "blue", "tags": ["a"]}
BLUE = {"enum": ["red", "blue"]}


@pytest.mark.parametrize(
    ("kind", "schema", "given", "made"),
    [
        (Colour, BLUE, "blue", Colour.BLUE),
        (Unit, {"enum": ["c", "f"]}, "f", Unit.F),
        (Level, {"enum": [1, 2]}, 2, Level.HIGH),
        (Point, {"enum": ["HERE", "THERE"]}, "THERE", Point.THERE),
        (MIXED, {"enum": ["all", 1, True, None, "blue"]}, 1, 1),
        (MIXED, {"enum": ["all", 1, True, None, "blue"]}, True, True),
        (MIXED, {"enum": ["all", 1, True, None, "blue"]}, None, None),
        (MIXED, {"enum": ["all", 1, True, None, "blue"]}, "blue", Colour.BLUE),
        (Place, PLACE, OSLO_JSON, OSLO),
        (Place, PLACE, {"name": "Bonn"}, Place("Bonn")),
        (
            Seat,
            {
                "type": "object",
                "properties": {"row": {"type": "integer"}, "side": {"enum": ["left", "right"]}},
                "required": ["row"],
                "additionalProperties": False,
            },
            {"row": 3},
            Seat(3),
        ),
        (
            Options,
            {
                "type": "object",
                "properties": {"unit": {"enum": ["c", "f"]}, "at": PLACE},
                "required": ["unit"],
                "additionalProperties": False,
            },
            {"unit": "c", "at": OSLO_JSON},
            {"unit": Unit.C, "at": OSLO},
        ),
        (OPTIONAL, {"anyOf": [BLUE, {"type": "null"}]}, None, None),
        (UNION, {"anyOf": [BLUE, PLACE]}, OSLO_JSON, OSLO),
        (Seat | Place | None, None, {"row": 1, "side": "right"}, Seat(1, "right")),
        (float | int, {"anyOf": [{"type": "number"}, {"type": "integer"}]}, 5, 5),
        (
            list[list[Colour | None]],
            None,
            [["red", None], [], ["blue"]],
            [[Colour.RED, None], [], [Colour.BLUE]],
        ),
        (Sequence[Seat], None, [{"row": 1}], [Seat(1)]),
        (dict[str, list[Place]], None, {"a": [OSLO_JSON]}, {"a": [OSLO]}),
        (set[Unit], {"type": "array", "items": {"enum": ["c", "f"]}}, ["c", "c"], {Unit.C}),
        (tuple[Level, ...], {"type": "array", "items": {"enum": [1, 2]}}, [1], (Level.LOW,)),
        (
            tuple[Colour, int],
            {
                "type": "array",
                "prefixItems": [BLUE, {"type": "integer"}],
                "minItems": 2,
                "maxItems": 2,
            },
            ["red", 4],
            (Colour.RED, 4),
        ),
        (Annotated[Colour, "Which."], {**BLUE, "description": "Which."}, "red", Colour.RED),
        (Id, {"type": "integer"}, 4, 4),
        (float, {"type": "number"}, 4, 4.0),
        (Any, {}, [1, {"a": None}], [1, {"a": None}]),
    ],
)
def test_kinds(kind: Any, schema: Any, given: Any, made: Any) -> None:
    """The schema, that a grammar keeps all of it, and the very types that come of a value."""
    schemas = Schemas()
    found = schemas.of(kind, "x")
    if schema is not None:
        assert json.dumps(found) == json.dumps(schema)
    assert schemas.defs == {}
    assert kept_schema(found)[1] == ()
    ours = value_of(kind, given)
    assert (ours, _types(ours)) == (made, _types(made))
    assert value_of(kind, json.loads(json.dumps(given))) == made


def _types(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value), [_types(each) for each in value]
    if isinstance(value, dict):
        return {key: _types(each) for key, each in value.items()}
    return type(value)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (Colour, "green", "'green' is none of"),
        (Level, True, "True is none of"),
        (Literal[1], "1", "'1' is none of"),
        (int, "5", "'5' is no integer"),
        (int, True, "True is no integer"),
        (int, 5.5, "5.5 is no integer"),
        (str, 5, "5 is no string"),
        (Place, {"name": "Oslo", "colour": "green"}, "'green' is none of"),
        (Place, {}, "Place lacks 'name'"),
        (Place, {"name": "Oslo", "x": 1, "hidden": 1}, "Place has no 'hidden', has no 'x'"),
        (Place, "Oslo", "'Oslo' is no object"),
        (Options, {"at": OSLO_JSON}, "Options lacks 'unit'"),
        (Seat | Colour, {"row": "a"}, "fits none of its types.*no integer.*none of"),
        (list[Colour], "red", "'red' is no array"),
        (dict[str, int], [], "no object"),
        (tuple[int, int], [1], "1 elements: expected 2"),
    ],
)
def test_what_a_schema_does_not_allow(kind: Any, given: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        value_of(kind, given)


def test_a_class_within_itself() -> None:
    """Behind a reference, which leads from the root of the function's schema on."""

    def walk(node: Node, other: Node | None = None) -> list[int]:
        assert isinstance(node, Node)
        return [node.value, *(n for each in node.next for n in walk(each))]

    parameters = tool_of(walk)["function"]["parameters"]
    assert parameters["properties"]["node"] == {"$ref": "#/$defs/Node"}
    assert parameters["$defs"]["Node"]["properties"]["next"]["items"] == {"$ref": "#/$defs/Node"}
    assert kept_schema(parameters)[1] == ()
    said = json.dumps({"node": {"value": 1, "next": [{"value": 2, "next": [{"value": 3}]}]}})
    assert json.loads(result_of(walk, said)) == [1, 2, 3]


def test_errors_are_told_with_the_parameters_name() -> None:
    def paint(colour: Colour) -> Colour:
        return colour

    assert json.loads(result_of(paint, '{"colour": "red"}')) == "red"
    said = result_of(paint, '{"colour": "green"}')
    assert said == "error: ValueError: colour: 'green' is none of ['red', 'blue']"


def test_results_are_json() -> None:
    found = {"at": OSLO, "all": {Level.LOW}, "here": Point.HERE, "odd": 3j}
    said = json.loads(json.dumps(found, default=to_json))
    assert said == {"at": {**OSLO_JSON, "hidden": 3}, "all": [1], "here": "HERE", "odd": "3j"}


def test_what_json_has_not() -> None:
    for kind in (Literal[b"a"], complex, list[bytes], dict[int, int]):
        with pytest.raises(TreadleError, match=r"x is .*of JSON"):
            Schemas().of(kind, "x")

    @dataclass
    class Odd:
        z: complex

    with pytest.raises(TreadleError, match=r"x: Odd\.z is <class 'complex'>: no type of JSON"):
        Schemas().of(Odd, "x")


@dataclass
class Left:
    right: Right | None = None


@dataclass
class Right:
    left: Left | None = None


def test_two_classes_that_have_each_other() -> None:
    """The second is met within the first, and by itself."""

    def tool(a: Left, b: Right) -> str:
        return f"{a} {b}"

    parameters = tool_of(tool)["function"]["parameters"]
    assert parameters["properties"]["a"] == {"$ref": "#/$defs/Left"}
    left = Left(Right(Left()))
    given = '{"a": {"right": {"left": {}}}, "b": {"left": {"right": null}}}'
    assert result_of(tool, given) == f"{left} {Right(Left())}"


def test_dicts_of_typing_extensions() -> None:
    """Python 3.10 has nothing else for keys that may be lacking, and pydantic wants them."""
    extensions = pytest.importorskip("typing_extensions")
    fields = {"n": int, "word": extensions.NotRequired[str]}
    made = Schemas().of(extensions.TypedDict("Said", fields), "")
    assert made["properties"] == {"n": {"type": "integer"}, "word": {"type": "string"}}
    assert made["required"] == ["n"]


def test_python_3_10_has_what_is_imported_from_typing() -> None:
    newer = {"NotRequired", "Required", "Self", "Never", "Unpack", "assert_never", "override"}
    newer |= {"LiteralString", "assert_type", "reveal_type", "TypeVarTuple", "dataclass_transform"}
    for path in Path(treadle.__file__).parent.rglob("*.py"):
        # At the start of a line: what TYPE_CHECKING guards is not run.
        for names in re.findall(r"^from typing import (\([^)]*\)|.*)", path.read_text(), re.M):
            assert newer.isdisjoint(re.findall(r"\w+", names)), path
