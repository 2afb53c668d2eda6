"""Grammars as they constrain generation: masks, acceptance, ends, errors."""

from __future__ import annotations

import gc
import json
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLParserLimits

from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import CONTROL, NORMAL, UNUSED, accepts, load_bpe
from treadle.errors import GrammarError
from treadle.grammar.grammar import Grammar, Matcher
from treadle.tokenizer.tokenizer import Tokenizer

AMBIGUOUS = 'root ::= x\nx ::= "(" x ")" x | [a-z ]* | x [a-z ] x'


def allowed(matcher: Matcher, n: int) -> list[int]:
    logits = np.zeros(n, np.float32)
    matcher.mask(logits)
    ids: list[int] = np.flatnonzero(logits == 0).tolist()
    assert np.isneginf(np.delete(logits, ids)).all()
    return ids


def test_from_the_first_token_to_the_end(bytes_tokenizer: Tokenizer) -> None:
    matcher = Grammar.from_gbnf('root ::= "ab" "c"?', bytes_tokenizer).matcher()
    assert allowed(matcher, 259) == [3 + ord("a")]
    assert not matcher.accepting
    matcher.accept(3 + ord("a"))
    matcher.accept(3 + ord("b"))
    assert matcher.accepting
    assert not matcher.done
    assert allowed(matcher, 259) == [2, 3 + ord("c")]  # the end, or one more
    assert matcher.start_bits().wait() == matcher.bits()
    copy = matcher.copy()
    matcher.accept(3 + ord("c"))
    assert matcher.done
    assert allowed(matcher, 259) == [2]
    assert allowed(copy, 259) == [2, 3 + ord("c")]
    copy.accept(2)
    assert copy.done
    matcher.rollback(1)
    assert allowed(matcher, 259) == [2, 3 + ord("c")]
    with pytest.raises(GrammarError):
        matcher.rollback(99)


def test_a_token_without_a_place_is_an_error(bytes_tokenizer: Tokenizer) -> None:
    grammar = Grammar.from_regex("[0-9]+", bytes_tokenizer)
    for token in (3 + ord("x"), 0, -1, 10**9):
        matcher = grammar.matcher()
        matcher.accept(3 + ord("1"))
        with pytest.raises(GrammarError):
            matcher.accept(token)
    # The matcher does not go on as if nothing had been: llguidance alone would allow the end.
    matcher = grammar.matcher()
    with pytest.raises(GrammarError, match="byte 'x' fails") as caught:
        matcher.accept(3 + ord("x"))
    assert "<state>" not in str(caught.value)
    with pytest.raises(GrammarError):
        matcher.mask(np.zeros(259, np.float32))


def test_logits_of_other_sizes(bytes_tokenizer: Tokenizer) -> None:
    """A model's rows may be padded past the vocabulary; the padding is never allowed."""
    matcher = Grammar.from_gbnf("root ::= .+", bytes_tokenizer).matcher()
    assert max(allowed(matcher, 320)) <= 258
    logits = np.zeros(259, np.float64)
    matcher.mask(logits)
    assert np.isneginf(logits[:3]).all()


def test_nothing_to_choose(tmp_path: Path) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", eos_token_id=0)
    matcher = Grammar.from_gbnf('root ::= "ab"', tokenizer).matcher()
    with pytest.raises(GrammarError, match="no next token"):
        matcher.mask(np.zeros(90, np.float32))  # the only token, 97, has no logit


@pytest.mark.slow
def test_every_end_of_generation_is_allowed_at_the_end(load: Load) -> None:
    tokenizer = load("llama-bpe")
    matcher = Grammar.from_gbnf('root ::= "yes"', tokenizer).matcher()
    for id in tokenizer.encode("yes", bos=False):
        matcher.accept(id)
    assert set(allowed(matcher, tokenizer.n_vocab)) == tokenizer.eog


def test_a_vocabulary_without_an_end(tmp_path: Path) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", more=[("<c>", CONTROL), ("u", UNUSED)])
    assert not tokenizer.eog
    matcher = Grammar.from_gbnf('root ::= "u" | "<c>"', tokenizer).matcher()
    assert allowed(matcher, 258) == [ord("<"), ord("u")]
    matcher.accept(ord("u"))
    assert matcher.done
    assert allowed(matcher, 258) == []  # nothing may follow, and nothing says so


def test_tokens_by_name(tmp_path: Path) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", more=[("<think>", CONTROL), ("x", NORMAL)])
    for name in ("<think>", "<[256]>"):
        matcher = Grammar.from_gbnf(f'root ::= {name} "a"', tokenizer).matcher()
        assert allowed(matcher, 257) == [256]
        matcher.accept(256)
        assert allowed(matcher, 257) == [97]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-spm", "llama-bpe", "qwen2", "gpt-2"])
def test_real_vocabularies(load: Load, data: Path, name: str) -> None:
    """The tokenizer's own way through a text is open at every step."""
    tokenizer = load(name)
    text = json.dumps({"name": "Ada Lovelace", "é": [1, 2.5, True, None, "🦙"]}, ensure_ascii=False)
    gbnf = (data / "grammars/json.gbnf").read_text("utf-8")
    for grammar in (
        Grammar.from_gbnf(gbnf, tokenizer),
        Grammar.from_json_schema({"type": "object"}, tokenizer),
    ):
        matcher = grammar.matcher()
        for id in tokenizer.encode_plain(text, start=False):
            assert id in allowed(matcher, tokenizer.n_vocab), tokenizer.piece(id)
            matcher.accept(id)
        assert matcher.accepting


@pytest.mark.parametrize("name", ["llama-spm", "gpt-2"])
def test_a_fixed_text_that_the_tokenizer_does_not_spell(load: Load, name: str) -> None:
    """SPM reads a ``\u2581`` as a space: at such a place single bytes are allowed."""
    tokenizer = load(name)
    text = "low \u2581\u2582 high \u2581"
    matcher = Grammar.from_gbnf(f'root ::= "{text}" [xy]', tokenizer).matcher()
    ids = list[int]()
    while not matcher.done:
        ids.append(allowed(matcher, tokenizer.n_vocab)[-1])
        matcher.accept(ids[-1])
    said = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert said[:-1] == text
    assert len(ids) < len(text.encode())  # what stands before it is in pieces


def test_ctrl_c_while_the_tokenizer_is_asked(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """llguidance made an error of the grammar's of it, and nobody heard of the key."""
    tokenizer = load("llama-spm")
    pressed = [0]
    matcher = Grammar.from_gbnf('root ::= "a long text that is fixed" [xy]', tokenizer).matcher()
    usual = tokenizer.encode_plain

    def encode(text: str, *, start: bool) -> list[int]:
        pressed[0] += 1
        signal.raise_signal(signal.SIGINT)
        return usual(text, start=start)

    monkeypatch.setattr(tokenizer, "encode_plain", encode)
    for call in (matcher.bits, matcher.forced):
        with pytest.raises(KeyboardInterrupt):
            call()
    monkeypatch.undo()
    assert pressed[0] >= 2
    while not matcher.done:
        matcher.accept(allowed(matcher, tokenizer.n_vocab)[-1])


@pytest.mark.slow
def test_vocabularies_are_let_go(tmp_path: Path) -> None:
    tokenizer = load_bpe(tmp_path / "v.gguf", more=[("<eos>", CONTROL)], eos_token_id=256)
    accepting = Grammar.from_regex("a", tokenizer).matcher()
    gone = weakref.ref(tokenizer)
    del tokenizer, accepting
    gc.collect()
    assert gone() is None


# -- JSON schema --------------------------------------------------------------------------

# What llama.cpp's tests expect, and llguidance sees otherwise. Each is right by JSON Schema:
# llama.cpp stops at 16 digits, and takes a schema with "items" for one of arrays alone.
OTHERWISE = {
    ("min 0", "100000000000000000000000000000000"),
    ("min+max items", "1"),
}
# What llguidance cannot enforce or finds malformed, and so refuses.
REFUSED = {"required props", "invalid type", "nullable string array"}


def test_schema_integration_cases(data: Path, bytes_tokenizer: Tokenizer) -> None:
    cases = json.loads((data / "grammars/grammar_integration.json").read_text("utf-8"))
    otherwise = set()
    refused = set()
    for case in cases:
        if case["kind"] != "json_schema":
            continue
        try:
            grammar = Grammar.from_json_schema(case["source"], bytes_tokenizer)
        except GrammarError:
            refused.add(case["name"])
            continue
        texts = [(text, True) for text in case["pass"]] + [(text, False) for text in case["fail"]]
        otherwise |= {(case["name"], t) for t, good in texts if accepts(grammar, t) != good}
    assert otherwise == OTHERWISE
    assert refused == REFUSED & {case["name"] for case in cases}


def test_schema_cases(data: Path, bytes_tokenizer: Tokenizer) -> None:
    cases = json.loads((data / "grammars/json_schema_to_grammar.json").read_text("utf-8"))
    refused = set()
    for case in cases:
        try:
            Grammar.from_json_schema(case["schema"], bytes_tokenizer)
        except GrammarError:
            refused.add(case["name"])
    assert len(cases) == 33
    assert refused == REFUSED & {case["name"] for case in cases}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "integer"}},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"minLength": 2}},
        {"oneOf": [{"type": "string", "minLength": 1}, {"type": "string", "maxLength": 3}]},
        {"dependentRequired": {"a": ["b"]}},
        {"propertyNames": {"maxLength": 3}},
        {"propertyNames": {"enum": ["a"]}, "required": ["b"]},
        {"type": "string", "format": "no-such-format"},
        {"type": "string", "pattern": "(?=a)b"},
        {"$ref": "http://example.com/schema"},
        {"$ref": "#/$defs/none"},
        {"type": "no-such-type"},
        {"enum": []},
        False,
        "{not json",
        "[1]",
        {"type": {1, 2}},
        {"type": "string", "format": "date", "allOf": 5},
        {"type": "object", "properties": {"a": {}}, "required": [["a"]]},
    ],
)
def test_what_cannot_be_honoured_is_an_error(bytes_tokenizer: Tokenizer, schema: Any) -> None:
    with pytest.raises(GrammarError):
        Grammar.from_json_schema(schema, bytes_tokenizer)


@pytest.mark.parametrize("schema", [None, 5, [], int, "[1]", "null", object])
def test_what_is_no_schema(bytes_tokenizer: Tokenizer, schema: Any) -> None:
    with pytest.raises(GrammarError, match=r"^JSON schema: expected a JSON object, its text"):
        Grammar.from_json_schema(schema, bytes_tokenizer)


def test_schema_forms(bytes_tokenizer: Tokenizer) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
    }
    schema |= {"additionalProperties": False, "$defs": {"x": {"type": "integer"}}}
    for form in (schema, json.dumps(schema)):
        grammar = Grammar.from_json_schema(form, bytes_tokenizer)
        assert accepts(grammar, '{"a": 12}')
        assert not accepts(grammar, '{"a": "12"}')
        assert not accepts(grammar, '{"a": 12, "b": 1}')
    assert accepts(Grammar.from_json_schema(True, bytes_tokenizer), '[1, {"x": null}]')


# -- regular expressions and Lark -----------------------------------------------------------


def test_regex(bytes_tokenizer: Tokenizer) -> None:
    grammar = Grammar.from_regex(r"(yes|no)/\d{2,3}", bytes_tokenizer)
    assert accepts(grammar, "yes/123")
    assert not accepts(grammar, "yes/1")
    for pattern in ("a(", "a(?=b)", r"\bfoo"):
        with pytest.raises(GrammarError, match="regex"):
            Grammar.from_regex(pattern, bytes_tokenizer)


def test_lark(bytes_tokenizer: Tokenizer) -> None:
    assert accepts(Grammar.from_lark('start: A+\nA: "x" /[0-9]/', bytes_tokenizer), "x1x2")
    for text in ("start: A", "x: A", "", "start: ("):
        with pytest.raises(GrammarError):
            Grammar.from_lark(text, bytes_tokenizer)


def test_errors_are_one_line_in_words(bytes_tokenizer: Tokenizer) -> None:
    for grammar in ('root ::= root "a"', 'root ::= b "x"\nb ::= root'):
        with pytest.raises(GrammarError, match="'root' refers only to itself"):
            allowed(Grammar.from_gbnf(grammar, bytes_tokenizer).matcher(), 259)
    with pytest.raises(GrammarError, match=r"schema's \$ref.* refers only to itself"):
        allowed(Grammar.from_json_schema({"$ref": "#"}, bytes_tokenizer).matcher(), 259)
    with pytest.raises(GrammarError) as caught:
        Grammar.from_json_schema({"type": "string", "pattern": "(?=a)b"}, bytes_tokenizer)
    assert str(caught.value).startswith(
        'JSON schema: "pattern": "(?=a)b" cannot be enforced: look-around, including'
    )
    assert "\n" not in str(caught.value)


# -- white space, formats, classes ---------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a": [1, 2], "b": {}}', True),
        ('{"a":[1,2],"b":{}}', True),
        ('{\n  "a": [\n    1,\n    2\n  ]\n}', True),
        ('{\n\t"a": []\n}', True),
        ('{\n\n"a": []}', False),
        ('{  "a": []}', False),
        ("{\n" + " " * 21 + '"a": []}', False),
        ('{"a": []}\n', False),
    ],
)
def test_white_space_has_an_end(bytes_tokenizer: Tokenizer, text: str, good: bool) -> None:
    assert accepts(Grammar.from_json_schema({"type": "object"}, bytes_tokenizer), text) == good


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31"],
            ["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-00-10", "2023-1-1"],
        ),
        ("time", ["12:06:59Z", "23:59:59.123+01:00"], ["12:06:60Z", "24:00:00Z", "12:06:59"]),
        (
            "date-time",
            ["2024-02-29T12:06:59Z", "2023-01-31T00:00:00.5-05:30"],
            ["2024-02-29T12:06:60Z", "2023-02-29T12:06:00Z", "2023-02-28 12:06:00Z"],
        ),
        (
            "email",
            ["ada@example.com", "a.b+c@d-e.f", "x" * 64 + "@y.z"],
            ["a..b@c.de", ".a@b.c", "a@-b.c", "x" * 65 + "@y.z", "a@b@c", "a@" + "b" * 64],
        ),
        ("hostname", ["a.b-c.de", "x" * 63], ["-a.b", "a..b", "x" * 64, "a." * 127 + "a"]),
        (
            "duration",
            ["P1Y2M3DT4H5M6S", "P3W", "PT1S", "P2M", "P1DT2M"],
            ["P", "P1S", "1Y", "PT", "P1DT", "P1YT", "P1Y2D", "P1234567D"],
        ),
        ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("ipv6", ["::1", "2001:db8::8a2e:370:7334"], ["1::2::3", "12345::", "1:2:3:4:5:6:7"]),
        ("uuid", ["123e4567-e89b-12d3-a456-426614174000"], ["123e4567e89b12d3a456426614174000"]),
        ("uri", ["https://a.b/c?d#e", "mailto:a@b.c"], ["/a/b", "a b:c", "1a:b"]),
    ],
)
def test_formats(bytes_tokenizer: Tokenizer, name: str, good: list[str], bad: list[str]) -> None:
    grammar = Grammar.from_json_schema({"type": "string", "format": name}, bytes_tokenizer)
    for text in good:
        assert accepts(grammar, json.dumps(text)), text
    for text in bad:
        assert not accepts(grammar, json.dumps(text)), text


def test_formats_wherever_they_stand(bytes_tokenizer: Tokenizer) -> None:
    date = {"type": "string", "format": "date", "pattern": "^2"}
    schema = {
        "type": "object",
        "properties": {"format": {"enum": [{"format": "date"}]}, "enum": {"items": date}},
        "required": ["format", "enum"],
    }
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
    assert accepts(grammar, '{"format": {"format": "date"}, "enum": ["2024-02-29"]}')
    assert not accepts(grammar, '{"format": {"format": "date"}, "enum": ["2023-02-29"]}')
    assert not accepts(grammar, '{"format": {"format": "date"}, "enum": ["1996-02-29"]}')


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"oneOf": [{"type": "string"}, {"minLength": 2}]}, "oneOf"),
        ({"type": "string", "format": "no-such"}, "no-such"),
        ({"type": "string", "format": "unknown"}, "format.*unknown"),
        ({"type": "no-such"}, "[tT]ype: no-such"),
        ({"$ref": "#/$defs/none"}, "/.defs/none"),
    ],
)
def test_errors_name_the_keyword(bytes_tokenizer: Tokenizer, schema: Any, keyword: str) -> None:
    with pytest.raises(GrammarError, match=f"^JSON schema: .*{keyword}"):
        Grammar.from_json_schema(schema, bytes_tokenizer)


@pytest.mark.parametrize(
    ("part", "keyword"),
    [
        ({"type": "string", "pattern": "^(?!x)[a-z]{2}$"}, '"pattern": "^(?!x)'),
        ({"type": "string", "pattern": r"^(a)\1$"}, '"pattern": "^(a)'),
        ({"type": "string", "pattern": "^[^\ud800]*$"}, '"pattern": "^[^\\ud800'),
        ({"$ref": "https://example.com/other.json"}, '"$ref": "https://example'),
        ({"$ref": "#/$defs/none"}, '"$ref": "#/$defs/none"'),
        ({"type": "string", "format": "unknown"}, '"format": "unknown"'),
        ({"type": "object", "patternProperties": {"^(?!x)": {}}}, '"patternProperties": "^(?!x)"'),
    ],
)
def test_what_no_grammar_can_keep_is_named_or_left_out(
    bytes_tokenizer: Tokenizer, part: Any, keyword: str
) -> None:
    """Alone: all else of the schema holds."""
    schema = {
        "type": "object",
        "properties": {"a": part, "n": {"$ref": "#/$defs/n"}},
        "required": ["a", "n"],
        "additionalProperties": False,
        "$defs": {"n": {"const": 1}},
    }
    with pytest.raises(GrammarError) as caught:
        Grammar.from_json_schema(schema, bytes_tokenizer)
    assert str(caught.value).startswith(f"JSON schema: {keyword}")
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer, lenient=True)
    (warning,) = grammar.warnings
    assert warning.startswith(f"JSON schema: {keyword}")
    assert warning.endswith("left out")
    value = '{"xy": 1}' if part.get("type") == "object" else '"zz"'
    assert accepts(grammar, f'{{"a": {value}, "n": 1}}')
    assert not accepts(grammar, f'{{"a": {value}, "n": 2}}')
    assert accepts(grammar, '{"a": 5, "n": 1}') is ("type" not in part)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/a%20~1b", "$defs": {"a /b": {"const": 1}}},
        {"$ref": "#x", "$defs": {"a": {"$anchor": "x", "const": 1}}},
        {"$ref": "item", "$defs": {"a": {"$id": "item", "const": 1}}},
        {
            "$id": "https://example.com/a.json",
            "$ref": "https://example.com/a.json#/$defs/a",
            "$defs": {"a": {"const": 1}},
        },
        {"allOf": [{"$ref": "#/allOf/1"}, {"const": 1}]},
    ],
)
def test_references_within_a_schema(bytes_tokenizer: Tokenizer, schema: Any) -> None:
    grammar = Grammar.from_json_schema(schema, bytes_tokenizer, lenient=True)
    assert not grammar.warnings
    assert accepts(grammar, "1")
    assert not accepts(grammar, "2")


class Person:
    """What a pydantic class looks like from here."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


class NoSchema:
    """A class whose library finds no schema for it."""

    def model_json_schema(self) -> dict[str, Any]:
        raise RuntimeError("a callable has no schema")


def test_a_class_that_tells_its_schema(bytes_tokenizer: Tokenizer) -> None:
    for schema in (Person, Person()):
        grammar = Grammar.from_json_schema(schema, bytes_tokenizer)
        assert accepts(grammar, '{"n": 1}')
        assert not accepts(grammar, '{"n": "1"}')
    with pytest.raises(GrammarError, match="RuntimeError: a callable has no schema"):
        Grammar.from_json_schema(NoSchema(), bytes_tokenizer)


def test_a_pydantic_class(bytes_tokenizer: Tokenizer) -> None:
    pydantic = pytest.importorskip("pydantic")
    city = pydantic.create_model("City", name=(str, ...), founded=(int | None, None))
    person = pydantic.create_model("Person", city=(city, ...))
    grammar = Grammar.from_json_schema(person, bytes_tokenizer)
    assert accepts(grammar, '{"city": {"name": "Paris", "founded": null}}')
    assert not accepts(grammar, '{"city": "Paris"}')


# -- messages ------------------------------------------------------------------------------


def test_errors_say_where_the_answer_is(bytes_tokenizer: Tokenizer) -> None:
    matcher = Grammar.from_gbnf('root ::= "abc"', bytes_tokenizer).matcher()
    with pytest.raises(GrammarError, match=r"at the beginning: .* token 123 \('<0x78>'\)"):
        matcher.copy().accept(3 + ord("x"))
    matcher.accept(3 + ord("a"))
    matcher.accept(3 + ord("b"))
    with pytest.raises(GrammarError, match=r"after 2 tokens \(...'ab'\): .*allow token 123"):
        matcher.accept(3 + ord("x"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "source", "of"),
    [
        ("regex", "(c{1000}){1000}", "regex: too large"),
        ("regex", "[xy](c{1000}){1000}", "regex: too large"),
        ("regex", "c" * 200_000, "regex: too large"),
        (
            "json_schema",
            {"pattern": "^(d{1000}){900}$", "type": "string"},
            "JSON schema: too large",
        ),
        ("gbnf", 'root ::= ("e"{1000}){900}', "grammar: too large"),
        ("lark", "start: /(f{1000}){900}/", "grammar: too large"),
    ],
    ids=["fixed", "fixed behind a choice", "written out", "schema", "gbnf", "lark"],
)
def test_what_is_too_large_is_refused_before_an_answer(
    bytes_tokenizer: Tokenizer, form: str, source: Any, of: str
) -> None:
    """Each mask would find a fixed text anew, and cut it into tokens."""
    with pytest.raises(GrammarError, match=f"^{of}"):
        getattr(Grammar, f"from_{form}")(source, bytes_tokenizer)


@pytest.mark.slow
def test_large_grammars_that_are_used(load: Load) -> None:
    """What programs make of their types is followed on a large vocabulary."""
    tokenizer = load("llama-bpe")
    names = [f"property_{i}" for i in range(300)]
    texts = {name: {"type": ["string", "null"], "maxLength": 100} for name in names}
    choices = [f"choice {i * 7919 % 100_003}" for i in range(5000)]
    for schema, text in (
        ({"type": "object", "properties": texts, "additionalProperties": False}, '{"property_7": '),
        ({"enum": choices}, '"choice 7919"'),
        ({"type": "string", "maxLength": 20_000}, '"abc'),
        ({"const": "a fixed text " * 1000}, '"a fixed text a fixed text '),
    ):
        matcher = Grammar.from_json_schema(schema, tokenizer).matcher()
        for token in tokenizer.encode_plain(text, start=False):
            matcher.bits()
            matcher.accept(token)
    matcher = Grammar.from_regex("([a-z]{1,30} ){1,300}", tokenizer).matcher()
    for token in tokenizer.encode_plain("some words ", start=False):
        matcher.bits()
        matcher.accept(token)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gbnf", "limit", "rest"),
    [
        (
            AMBIGUOUS,
            {"step_max_items": 3000},
            ", in rule 'x' (line 2): parser limit reached (Too many items (limit 3000; mask))",
        ),
        (
            AMBIGUOUS,
            {"max_items_in_row": 300},
            ", in rule 'x' (line 2): parser limit reached (Current row has 301 items; max is 300)",
        ),
        (
            'root ::= [ab]* "a" [ab]{20}',
            {"step_lexer_fuel": 300},
            ": parser limit reached (too many expressions constructed)",
        ),
    ],
    ids=["items of a step", "items of a row", "fuel of the lexer"],
)
def test_a_limit_that_is_reached_within_an_answer(
    bytes_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    gbnf: str,
    limit: dict[str, Any],
    rest: str,
) -> None:
    """Limits are lowered, for the real ones take a long text; reaching them is llguidance's."""
    grammar = Grammar.from_gbnf(gbnf, bytes_tokenizer)
    monkeypatch.setattr("treadle.grammar.grammar._limits", lambda: LLParserLimits(**limit))
    matcher = Matcher(grammar)
    text = ""

    def write_on() -> None:
        nonlocal text
        while len(text) < 500:
            allowed(matcher, 259)
            letter = "aab"[len(text) % 3]
            matcher.accept(3 + ord(letter))
            text += letter

    with pytest.raises(GrammarError) as caught:
        write_on()
    assert text
    assert str(caught.value) == (
        f"after {len(text)} tokens (...{text[-32:]!r}): the grammar "
        f"is too ambiguous or too large{rest}"
    )
    with pytest.raises(GrammarError, match="too ambiguous"):  # nor is there a way around it
        write_on()


def test_a_lexer_that_other_answers_have_filled(
    bytes_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of all answers are in one lexer, which has a limit; an answer alone is far off."""
    monkeypatch.setattr(
        "treadle.grammar.grammar._limits", lambda: LLParserLimits(max_lexer_states=400)
    )
    grammar = Grammar.from_regex("[a-z]{60}|[A-Z]([a-z]{50}|.*[a-f].{9}x)", bytes_tokenizer)
    early = grammar.matcher()
    early.accept(3 + ord("a"))
    rng = np.random.default_rng(1)
    for _ in range(40):  # each finds states of its own
        matcher = grammar.matcher()
        for letter in "Q" + "".join(rng.choice(list("agz"), 14)):
            matcher.bits()
            matcher.accept(3 + ord(letter))
    for _ in range(59):
        early.bits()
        early.accept(3 + ord("b"))
    assert early.done
