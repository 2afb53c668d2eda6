"""GBNF: what it accepts, by a vocabulary of bytes; what is wrong with a grammar, by place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tokenizer.vocabularies import accepts
from treadle.errors import GrammarError
from treadle.grammar.gbnf import parse_gbnf
from treadle.grammar.grammar import Grammar
from treadle.tokenizer.tokenizer import Tokenizer

GRAMMARS = ("arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list")


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("arithmetic", "a+2*3=6\n", "a+=6\n"),
        ("c", "int f(){int x = 1;}", "int f(){x + }"),
        ("chess", "1. e4 e5\n2. Nf3 Nc6\n", "1. e9 e5\n"),
        ("english", "Hello there,\tyou!", "naïve"),
        ("japanese", "こんにちは 世界", "hello"),
        ("json", '{"a": [1, "\\u00e9", null]}', '{"a": }'),
        ("json_arr", '[\n1,\n{"b":true}]', '{"b":true}'),
        ("list", "- é one\n- two\n", "- one\u2028\n"),
    ],
)
def test_llamacpp_grammars(
    data: Path, bytes_tokenizer: Tokenizer, name: str, good: str, bad: str
) -> None:
    text = (data / f"grammars/{name}.gbnf").read_text("utf-8")
    grammar = Grammar.from_gbnf(text, bytes_tokenizer)
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


def test_all_grammars_of_the_folder_are_tested(data: Path) -> None:
    assert sorted(path.stem for path in (data / "grammars").glob("*.gbnf")) == sorted(GRAMMARS)


@pytest.mark.slow
def test_integration_cases(data: Path, bytes_tokenizer: Tokenizer) -> None:
    """The grammars of llama.cpp's tests, those that it made from schemas included."""
    cases = json.loads((data / "grammars/grammar_integration.json").read_text("utf-8"))
    assert len(cases) == 22
    for case in cases:
        grammar = Grammar.from_gbnf(case["grammar"], bytes_tokenizer)
        for text in case["pass"]:
            assert accepts(grammar, text), (case["name"], text)
        for text in case["fail"]:
            assert not accepts(grammar, text), (case["name"], text)


def test_grammars_made_from_schemas_parse(data: Path, bytes_tokenizer: Tokenizer) -> None:
    cases = json.loads((data / "grammars/json_schema_to_grammar.json").read_text("utf-8"))
    grammars = [case["grammar"] for case in cases if case["grammar"].strip()]
    assert len(grammars) == 32
    for grammar in grammars:
        Grammar.from_gbnf(grammar, bytes_tokenizer)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # No part takes characters that a later part needs: there is no lexer.
        ('root ::= [a-z]+ "s"', ["cats", "ss"], ["s", "cat"]),
        ('root ::= "ab" | "a" "bX"', ["ab", "abX"], ["a", "abx"]),
        ('root ::= "a"* "a"{2} "a"?', ["aa", "aaaaa"], ["a"]),
        ('root ::= ("a" | "b"){2,3}', ["ab", "bbb"], ["a", "abab"]),
        ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
        ('root ::= "a"{0} ("b" "c"){0,0} "d"', ["d"], ["ad", "bcd"]),
        ('root ::= x{0} "d"\nx ::= "y" x?', ["d"], ["yd"]),
        ('root ::= "a"{0,1} ("b")?', ["", "a", "ab"], ["aa"]),
        ("root ::= .", ["a", "\n", "🦙"], ["", "aa"]),
        ("root ::= [^a-c\\n]", ["d", "🦙", "\0"], ["b", "\n"]),
        ("root ::= [-a] [a-] [\\]\\[^]", ["-a]", "a-^"], ["b-]"]),
        ('root ::= "\\x41\\u00e9\\U0001F999\\t\\"\\\\"', ['Aé🦙\t"\\'], ["A"]),
        ("root ::= [\\u0400-\\u04FF]+", ["нещо"], ["a"]),
        ('root ::= ""', [""], ["a"]),
        ('root ::= | "a"', ["", "a"], ["aa"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)"]),
        ('root ::= root "a" | "a"', ["a", "aaa"], [""]),  # left recursion
        ('root ::= A-b a-B\nA-b ::= "1"\na-B ::= "2"', ["12"], ["21"]),
        ('# c\nroot ::= # c\n  "a" # c\n\n  | "b" # c\n#end', ["a", "b"], ["ab"]),
        ('root ::= ( # c\n "a"\n | "b"\n)\r\n', ["a", "b"], [""]),
        ('root ::= "a" "b"*\nx::="y"', ["a", "abb"], ["y"]),
        ('root ::= "/" [/] "\'" "{}" "#"', ["//'{}#"], ["/"]),
    ],
)
def test_notation(
    bytes_tokenizer: Tokenizer, grammar: str, good: list[str], bad: list[str]
) -> None:
    compiled = Grammar.from_gbnf(grammar, bytes_tokenizer)
    for text in good:
        assert accepts(compiled, text), text
    for text in bad:
        assert not accepts(compiled, text), text


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1, max_size=8))
def test_any_character_as_literal_and_class(bytes_tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    escaped = "".join(f"\\U{ord(c):08X}" for c in text)
    for grammar in (f'root ::= "{escaped}"', f"root ::= [{escaped}]{{{len(text)}}}"):
        assert accepts(Grammar.from_gbnf(grammar, bytes_tokenizer), text)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("", "rule 'root' is missing"),
        ('x ::= "a"', "rule 'root' is missing"),
        ('root ::= "a" foo', "line 1, column 14: rule 'foo'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: .*twice"),
        ('root := "a"', "line 1, column 6: expected '::='"),
        ('root ::=\n  "a', "line 2, column 3: .*not closed"),
        ("root ::= [a", "column 10: .*not closed"),
        ("root ::= []", "class is empty"),
        ("root ::= [z-a]", "reversed"),
        ('root ::= "\\q"', "unknown escape"),
        ('root ::= "\\xZZ"', "unknown escape"),
        ('root ::= "\\uD800"', "not a valid character"),
        ('root ::= "\\', "ends inside|not closed|unknown escape"),
        ('root ::= ("a"', "column 10: .*not closed"),
        ('root ::= "a" )', "column 14: unexpected '\\)'"),
        ('root ::= "a"{2,1}', "minimum 2 is above the maximum 1"),
        ('root ::= "a"{x}', "expected {n}"),
        ("root ::= *", "unexpected '\\*'"),
        ("root ::= " + "(" * 3000, "nested more than 100 deep"),
        ("#" * (1 << 21), "characters"),
        ('root ::= "a"{999999999999}', "999999999999"),
        ('root ::= "' + "a" * 99_999 + '"', "more than"),
        ("root ::= <no-such-token>", "no-such-token"),
    ],
)
def test_errors_say_where(bytes_tokenizer: Tokenizer, grammar: str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Grammar.from_gbnf(grammar, bytes_tokenizer).matcher()


def test_a_grammar_of_no_text(bytes_tokenizer: Tokenizer) -> None:
    for grammar in ("root ::= root", 'root ::= "a" x\nx ::= x "b"', 'root ::= "(" root ")"'):
        with pytest.raises(GrammarError, match="line 1: rule 'root' refers only to itself"):
            Grammar.from_gbnf(grammar, bytes_tokenizer)


@settings(max_examples=200)
@given(text=st.text('root:= \n"[]a-z(){}1,|*+?.\\x^#<>'))
def test_any_text_is_a_grammar_or_an_error(text: str) -> None:
    try:
        rules = parse_gbnf(text)
    except GrammarError:
        return
    assert "root" in rules.body
