"""Schemas that llguidance would read otherwise, or that would end the process or hold it up."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tokenizer.vocabularies import accepts
from treadle.errors import GrammarError
from treadle.grammar.grammar import Grammar
from treadle.grammar.llguidance_limits import COUNTS, LENGTHS, LOWEST
from treadle.tokenizer.tokenizer import Tokenizer

# of 64 bits
LEAST = -(2**63)
MOST = 2**63 - 1


def chain(n: int, ref: str = "#/$defs/d{}") -> dict[str, Any]:
    """Objects in objects, each by a reference."""
    parts: dict[str, Any] = {
        f"d{i}": {"$anchor": f"d{i}", "properties": {"a": {"$ref": ref.format(i + 1)}}}
        for i in range(n)
    }
    return {"$ref": ref.format(0), "$defs": {**parts, f"d{n}": {"$anchor": f"d{n}"}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": LEAST}, '"const": -9223372036854775808 has -9223372036854775808, which'),
        ({"enum": [1, {"a": [LEAST + 512]}]}, '"enum": .* has -9223372036854775296, which'),
        ({"allOf": [{"type": "integer"}, {"minimum": LEAST, "maximum": LEAST}]}, '"maximum": -9'),
        (chain(5000), "too deeply nested: 15002 levels"),
        (chain(5000, "#d{}"), "too deeply nested: 15002 levels"),
        ({"type": "number", "multipleOf": 1_000_003}, '"multipleOf": 1000003 cannot'),
        ({"multipleOf": 10**400}, '"multipleOf": 1000.*: too large for a float64'),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, '"multipleOf": 9967 cannot'),
    ],
)
def test_what_would_end_or_hold_up_the_process(schema: Any, message: str) -> None:
    """In a process of its own, for without the limits it is killed, or takes minutes."""
    code = (
        "import sys; from treadle.errors import GrammarError\n"
        "from treadle.grammar.json_schema import schema_source\n"
        "from llguidance import LLMatcher\n"
        "try: LLMatcher.validate_grammar(schema_source(sys.stdin.read())[0])\n"
        "except GrammarError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(schema),
        text=True,
        capture_output=True,
        timeout=60,
        check=True,
    )
    with pytest.raises(GrammarError, match=f"^JSON schema: {message}"):
        raise GrammarError(done.stdout)


def test_references_that_are_not_too_deep(bytes_tokenizer: Tokenizer) -> None:
    assert accepts(Grammar.from_json_schema(chain(200), bytes_tokenizer), '{"a": {"a": {}}}')
    leaf = {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}
    wide: Any = {f"m{i}": {"type": "object", "properties": {"x": leaf}} for i in range(400)}
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": f"#/$defs/m{i}"} for i in range(400)},
        "$defs": {**wide, "leaf": {"const": 1}},
    }
    assert accepts(Grammar.from_json_schema(schema, bytes_tokenizer), '{"p7": {"x": 1}}')


@pytest.mark.parametrize(
    ("key", "n"),
    [
        *((key, n) for key in LENGTHS for n in (2**32, 2**53, 2**64, 1e10, 10**400)),
        *((key, n) for key in COUNTS for n in (2**63, 1e300, -1, 1.5, "3", True)),
    ],
)
def test_counts_that_cannot_be_kept(bytes_tokenizer: Tokenizer, key: str, n: Any) -> None:
    """llguidance refused the whole schema."""
    kind = "array" if "Items" in key else "object" if "Properties" in key else "string"
    value = {"type": kind, key: n}
    schema = {
        "properties": {"a/b": {"anyOf": [value, {"const": 1}]}, "n": {"const": 1}},
        "required": ["a/b", "n"],
    }
    where = "(at #/properties/a~1b/anyOf/0)"
    with pytest.raises(GrammarError, match=f'^JSON schema: "{key}": ') as caught:
        Grammar.from_json_schema(schema, bytes_tokenizer)
    assert str(caught.value).endswith(where)
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer, lenient=True)
    (warning,) = grammar.warnings
    assert warning == f"{caught.value}: left out"
    said = {"array": "[1, 2]", "object": '{"c": 2}', "string": '"zz"'}[kind]
    assert accepts(grammar, f'{{"a/b": {said}, "n": 1}}')
    assert not accepts(grammar, f'{{"a/b": {said}, "n": 2}}')
    assert not accepts(grammar, '{"a/b": 2, "n": 1}')


def test_counts_that_are_kept(bytes_tokenizer: Tokenizer) -> None:
    for most in (2, 2.0):
        grammar = Grammar.from_json_schema({"type": "string", "maxLength": most}, bytes_tokenizer)
        assert accepts(grammar, '"zz"')
        assert not accepts(grammar, '"zzz"')
    long = {"type": "string", "maxLength": 2**32 - 1}
    assert accepts(Grammar.from_json_schema(long, bytes_tokenizer), '"zz"')
    named = {"properties": {"maxLength": {"const": 1}}, "required": ["maxLength"]}
    assert accepts(Grammar.from_json_schema(named, bytes_tokenizer), '{"maxLength": 1}')


@pytest.mark.parametrize("n", [2**53 + 1, 2**63, 2**64 - 1, 10**400])
def test_numbers_that_would_be_rounded(bytes_tokenizer: Tokenizer, n: int) -> None:
    for schema in ({"const": n}, {"enum": ["a", {"b": [n]}]}):
        with pytest.raises(GrammarError, match="which cannot be written exactly"):
            Grammar.from_json_schema(schema, bytes_tokenizer)
        grammar = Grammar.from_json_schema(schema, bytes_tokenizer, lenient=True)
        (warning,) = grammar.warnings
        assert warning.endswith("left out")
        assert accepts(grammar, str(n))


@pytest.mark.parametrize("n", [2**53, 2**53 + 2, 2**62, MOST, 10**20, LOWEST, 0.1, 1e22, -7])
def test_numbers_that_are_exact(bytes_tokenizer: Tokenizer, n: float) -> None:
    grammar = Grammar.from_json_schema({"const": n}, bytes_tokenizer)
    assert accepts(grammar, "0.1" if n == 0.1 else str(int(n)))


def test_whole_numbers_of_64_bits(bytes_tokenizer: Tokenizer) -> None:
    """What code generators write of an int64."""
    schema = {"type": "integer", "minimum": LEAST, "maximum": MOST}
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
    for n, good in ((0, True), (MOST, True), (LOWEST, True), (LEAST - 1, False), (MOST + 1, False)):
        assert accepts(grammar, str(n)) is good


@pytest.mark.parametrize("n", [2**53 + 1, 2**60 + 77, 2**62 + 1, -(2**53) - 1, MOST - 10_000])
def test_bounds_that_are_no_float64(bytes_tokenizer: Tokenizer, n: int) -> None:
    """They were rounded, so numbers beyond them were allowed."""
    far = 2**12
    for low, high in ((n, n + far), (n - far, n)):
        schema = {"type": "integer", "minimum": low, "maximum": high}
        grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
        for beyond in (low - 1, high + 1):
            assert not accepts(grammar, str(beyond))
        assert accepts(grammar, str(int(float(low + far // 2))))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]+$', "a\\b\n/", 'a"b'),
        (r"^[^\\/]+$", 'a"b\n', "a\\b"),
        (r'^[^\n"]+$', "a\\b\t", 'a"b'),
        (r'^\[[^"]$', "[x", '["'),
        (r'^([a-z[^"]])+$', "A\n", '"'),
    ],
)
def test_classes_without_quotes_or_backslashes(
    bytes_tokenizer: Tokenizer, pattern: str, good: str, bad: str
) -> None:
    as_value = Grammar.from_json_schema({"type": "string", "pattern": pattern}, bytes_tokenizer)
    as_name = Grammar.from_json_schema(
        {"type": "object", "patternProperties": {pattern: {}}, "additionalProperties": False},
        bytes_tokenizer,
    )
    for said, wanted in ((good, True), (bad, False)):
        assert accepts(as_value, json.dumps(said)) is wanted
        assert accepts(as_name, json.dumps({said: 1})) is wanted


@pytest.mark.parametrize(
    ("bounds", "bad", "good"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ("0", "-0", "0.6"), ("0.001", "0.5")),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ("1", "1.0", "1.5"), ("1.001", "1.4")),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ("0", "-0", "-0.6"), ("-0.5", "-0.1")),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ("-1", "-1.6"), ("-1.5", "-1.01")),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ("0", "1"), ("0.00000000000001", "0.9")),
    ],
)
def test_exclusive_bounds(
    bytes_tokenizer: Tokenizer, bounds: Any, bad: tuple[str, ...], good: tuple[str, ...]
) -> None:
    grammar = Grammar.from_json_schema({"type": "number", **bounds}, bytes_tokenizer)
    assert [n for n in (*bad, *good) if accepts(grammar, n)] == list(good)


@pytest.mark.parametrize("most", [2**63 - 1, 2**63, 1e20, 10**400])
@pytest.mark.parametrize("kind", ["number", ["integer", "number"], ["number", "null"], None])
def test_upper_bounds_of_which_no_regex_is_made(
    bytes_tokenizer: Tokenizer, most: float, kind: Any
) -> None:
    """Of numbers that need not be whole; higher ones are then not written."""
    for key in ("maximum", "exclusiveMaximum"):
        schema = {key: most} if kind is None else {"type": kind, key: most}
        grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
        assert accepts(grammar, "-12.5")
        assert accepts(grammar, "9223372036854773760")
        assert not accepts(grammar, "9223372036854775807")


def test_an_upper_bound_of_whole_numbers_reaches_64_bits(bytes_tokenizer: Tokenizer) -> None:
    for kind in ("integer", ["integer", "null"]):
        grammar = Grammar.from_json_schema({"type": kind, "maximum": 2**64}, bytes_tokenizer)
        assert accepts(grammar, str(MOST))
        assert not accepts(grammar, str(MOST + 1))
