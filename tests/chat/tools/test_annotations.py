"""Parameters of functions that are tools: their schemas, and what is made of a call's arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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

import annotated_types
import pytest
from pydantic import AfterValidator, Field, PositiveInt, StringConstraints
from pydantic.dataclasses import dataclass as pydantic_dataclass

import treadle
from treadle.chat.tools.python_annotations import Schemas, to_json, value_of
from treadle.chat.tools.python_functions import result_of, tool_of
from treadle.errors import TreadleError
from treadle.grammar.json_schema import is_possible, kept_schema


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
# other classes than those of X | Y
OPTIONAL = Optional[Colour]  # noqa: UP045
UNION = Union[Colour, Place]  # noqa: UP007
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
        (Colour, "green", "'green' is not one of"),
        (Level, True, "True is not one of"),
        (Literal[1], "1", "'1' is not one of"),
        (int, "5", "'5': expected type integer"),
        (int, True, "True: expected type integer"),
        (int, 5.5, "5.5: expected type integer"),
        (str, 5, "5: expected type string"),
        (Place, {"name": "Oslo", "colour": "green"}, "'green' is not one of"),
        (Place, {}, "Place: missing 'name'"),
        (Place, {"name": "Oslo", "x": 1, "hidden": 1}, "Place: unknown 'hidden', unknown 'x'"),
        (Place, "Oslo", "'Oslo' is not an object"),
        (Options, {"at": OSLO_JSON}, "Options: missing 'unit'"),
        (
            Seat | Colour,
            {"row": "a"},
            "matches none of the allowed types.*expected type integer.*not one of",
        ),
        (list[Colour], "red", "'red' is not an array"),
        (dict[str, int], [], "not an object"),
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
    assert said == "error: ValueError: colour: 'green' is not one of ['red', 'blue']"


def test_results_are_json() -> None:
    found = {"at": OSLO, "all": {Level.LOW}, "here": Point.HERE, "odd": 3j}
    said = json.loads(json.dumps(found, default=to_json))
    assert said == {"at": {**OSLO_JSON, "hidden": 3}, "all": [1], "here": "HERE", "odd": "3j"}


def test_what_json_has_not() -> None:
    for kind in (Literal[b"a"], complex, list[bytes], dict[int, int]):
        with pytest.raises(TreadleError, match=r"x: .*JSON equivalent"):
            Schemas().of(kind, "x")

    @dataclass
    class Odd:
        z: complex

    with pytest.raises(
        TreadleError, match=r"x: Odd\.z: type <class 'complex'> has no JSON equivalent"
    ):
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


# -- limits -------------------------------------------------------------------------------------

LIMITED: dict[str, tuple[Any, dict[str, Any], list[Any], list[Any]]] = {
    "field": (
        Annotated[int, Field(ge=1, lt=9, description="how many")],
        {"type": "integer", "minimum": 1, "exclusiveMaximum": 9, "description": "how many"},
        [1, 8],
        [0, 9],
    ),
    "words": (
        Annotated[str, annotated_types.Len(2, 3), Field(pattern="^[a-z]+$")],
        {"type": "string", "minLength": 2, "maxLength": 3, "pattern": "^[a-z]+$"},
        ["ab"],
        ["a", "abcd", "AB"],
    ),
    "alias": (PositiveInt, {"type": "integer", "exclusiveMinimum": 0}, [1], [0]),
    "items": (
        Annotated[list[Annotated[float, Field(multiple_of=0.1)]], Field(max_length=1)],
        {"type": "array", "items": {"type": "number", "multipleOf": 0.1}, "maxItems": 1},
        [[], [0.3]],
        [[1, 2], [0.25]],
    ),
    "keys": (
        Annotated[dict[str, int], Field(min_length=1)],
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
        [{"a": 1}],
        [{}],
    ),
    "union": (
        Annotated[int | None, Field(ge=2, strict=True)],
        {"anyOf": [{"type": "integer", "minimum": 2}, {"type": "null"}]},
        [2, None],
        [1],
    ),
    "tightest": (
        Annotated[Annotated[int, annotated_types.Ge(1)], Field(ge=3), Field(ge=2)],
        {"type": "integer", "minimum": 3},
        [3],
        [2],
    ),
    "title": (
        Annotated[str, Field(title="T", examples=["x"], json_schema_extra={"default": "y"})],
        {"type": "string", "title": "T", "examples": ["x"], "default": "y"},
        ["x"],
        [1],
    ),
    "other": (Annotated[int, re.compile("a"), object()], {"type": "integer"}, [1], ["a"]),
}


@pytest.mark.parametrize("name", LIMITED)
def test_limits(name: str) -> None:
    """They reach the schema that holds the model, and a value that breaks one is an error."""
    kind, schema, good, bad = LIMITED[name]
    assert Schemas().of(kind, "x") == schema
    _, left_out = kept_schema(schema)
    assert left_out == ()
    for value in good:
        assert value_of(kind, value) == value
    for value in bad:
        with pytest.raises((TypeError, ValueError)):
            value_of(kind, value)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            Annotated[int, AfterValidator(abs)],
            "x: AfterValidator cannot be expressed in a JSON schema",
        ),
        (Annotated[int, Field(max_length=2)], "max_length does not apply to this type"),
        (
            Annotated[str, StringConstraints(strip_whitespace=True)],
            "strip_whitespace cannot be expressed",
        ),
        (Annotated[int, Field(alias="z")], r"Field\(alias=...\): aliases are not supported"),
        (Annotated[int, Field(default=3)], r"Field\(default=...\) within Annotated"),
        (Annotated[Literal[1, 2], Field(ge=1)], "ge does not apply"),
        (Annotated[str, Field(pattern="a"), Field(pattern="b")], "pattern is given twice"),
        (Annotated[str, Field(json_schema_extra=lambda _: None)], "expected a dict"),
    ],
)
def test_limits_that_are_refused(kind: Any, why: str) -> None:
    with pytest.raises(TreadleError, match=why):
        Schemas().of(kind, "x")


def test_fields_in_the_place_of_values() -> None:
    def f(n: int = Field(3, ge=1, description="how many"), word: str = Field(min_length=2)) -> str:
        return word * n

    parameters = tool_of(f)["function"]["parameters"]
    assert parameters["required"] == ["word"]
    n = {"type": "integer", "minimum": 1, "description": "how many"}
    assert parameters["properties"] == {"n": n, "word": {"type": "string", "minLength": 2}}
    assert result_of(f, '{"word": "ab"}') == "ababab"
    assert result_of(f, '{"word": "ab", "n": 0}') == "error: ValueError: n: 0: expected ge=1"


def test_dataclasses_of_pydantic() -> None:
    @pydantic_dataclass
    class Own:
        x: int = Field(ge=1)

    def f(own: Any) -> int:
        return int(own.x)

    f.__annotations__["own"] = Own
    (own,) = tool_of(f)["function"]["parameters"]["properties"].values()
    assert own["properties"]["x"]["minimum"] == 1
    assert own["required"] == ["x"]
    assert result_of(f, '{"own": {"x": 2}}') == "2"
    assert result_of(f, '{"own": {"x": 0}}').startswith("error: ValidationError")


# -- names of types -----------------------------------------------------------------------------


class TypeAliasType:
    """What ``type X = ...`` makes, from Python 3.12 on."""

    def __init__(self, name: str, behind: Callable[[], Any]) -> None:
        self.__name__ = name
        self._behind = behind

    @property
    def __value__(self) -> Any:
        return self._behind()

    def __call__(self) -> None:
        """Python 3.10 takes nothing else for a type."""


def list_of(kind: Any) -> Any:
    return list.__class_getitem__(kind)


JSON: Any = TypeAliasType("JSON", lambda: list_of(JSON) | dict[str, Any] | str | None)
TREE: Any = TypeAliasType("TREE", lambda: list_of(TREE))
SELF: Any = TypeAliasType("SELF", lambda: SELF)
ONE: Any = TypeAliasType("ONE", lambda: Optional[TWO])  # noqa: UP045
TWO: Any = TypeAliasType("TWO", lambda: Union[ONE, int])  # noqa: UP007
PLAIN: Any = TypeAliasType("PLAIN", lambda: int)
LOST: Any = TypeAliasType("LOST", lambda: dict[str, Any]()["LOST"])


def test_names_of_types() -> None:
    assert Schemas().of(list[PLAIN], "x") == {"type": "array", "items": {"type": "integer"}}
    for kind, value in ((JSON, {"a": ["b", None, {}]}), (TREE, [[], [[]]])):
        schemas = Schemas()
        schema = schemas.of(kind, "x")
        assert schema == {"$ref": f"#/$defs/{kind.__name__}"}
        assert is_possible({**schema, "$defs": schemas.defs})
        assert value_of(kind, value) == value
    with pytest.raises(ValueError, match="expected type string"):
        value_of(JSON, ["a", 1])


@pytest.mark.parametrize("kind", [SELF, ONE, TWO])
def test_names_that_stand_for_themselves(kind: Any) -> None:
    with pytest.raises(TreadleError, match="refers only to itself"):
        Schemas().of(kind, "x")
    with pytest.raises(TreadleError, match=r"x: .*LOST"):
        Schemas().of(LOST, "x")
    with pytest.raises(TypeError, match="refers only to itself"):
        value_of(SELF, 1)
