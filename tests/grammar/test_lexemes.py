"""Lexemes change nothing: grammars against a slow reader, and on a large vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.grammar.reference_gbnf import matches
from tests.tokenizer.conftest import Load
from tests.tokenizer.vocabularies import accepts
from treadle.errors import GrammarError
from treadle.grammar.gbnf import parse_gbnf
from treadle.grammar.grammar import Grammar, _complaints, _lark
from treadle.grammar.lexemes import lark_forms
from treadle.tokenizer.tokenizer import Tokenizer

ATOMS = ['"a"', '"b"', '"ab"', "[ab]", "[^a]", "[é-ê]", '"è"', "x", "y", "root", '("a" | x)', "x*"]
BODY = st.lists(
    st.lists(
        st.tuples(st.sampled_from(ATOMS), st.sampled_from(["", "", "", "*", "+", "?"])).map(
            lambda item: f"({item[0]}){item[1]}"
        ),
        max_size=3,
    ).map(" ".join),
    min_size=1,
    max_size=3,
).map(" | ".join)


def reads(source: str, tokenizer: Tokenizer, text: str) -> bool:
    return accepts(Grammar(_lark(source), tokenizer), text)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    root=BODY, x=BODY, y=BODY, texts=st.lists(st.text("abéèê", max_size=6), min_size=4, max_size=8)
)
def test_every_form_means_the_same(
    bytes_tokenizer: Tokenizer, root: str, x: str, y: str, texts: list[str]
) -> None:
    rules = parse_gbnf(f"root ::= ({root})\nx ::= ({x})\ny ::= ({y})")
    try:
        forms = list(lark_forms(rules))
    except GrammarError:
        assert not any(matches(rules, text) for text in texts)
        return
    for form in forms:
        assert _complaints(_lark(form), bytes_tokenizer) == (False, [])
        for text in texts:
            assert reads(form, bytes_tokenizer, text) == matches(rules, text), (form, text)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        # one state of two rules' stars, which once had one name
        ('root ::= (z | "c")* "b"\nz ::= "a" z* "d" | ""', ["aaddb", "cadb"], ["aadb"]),
        # a lexeme that ends inside a character's bytes for another way
        ('root ::= "(" root ")" | [é]+ x\nx ::= "è" root | "ê"', ["ééê", "(éèéê)"], ["éè", "é"]),
        ('root ::= t | root t\nt ::= [a-z]+ "s" | "(" root ")"', ["cats", "(catss)as"], ["cat"]),
    ],
)
def test_recursion(
    bytes_tokenizer: Tokenizer, grammar: str, good: list[str], bad: list[str]
) -> None:
    for form in lark_forms(parse_gbnf(grammar)):
        for text in good + bad:
            assert reads(form, bytes_tokenizer, text) == (text in good), (form, text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (
            'root ::= row ("\\n" row)*\nrow ::= field ("," field)*\nfield ::= [^",\\n]*',
            "name,place of birth\nAda Lovelace,London\n" * 40,
        ),
        ('root ::= ("<b>" [^<>]+ "</b>" | [^<>]+)*', "some <b>bold</b> text " * 60),
        ('root ::= node*\nnode ::= "<b>" node* "</b>" | [^<>]+', "a <b>b <b>c</b></b> d " * 60),
        ('root ::= "a" s\ns ::= [a-z] s | ""', "abcdefgh" * 500),
    ],
)
def test_long_texts_on_a_large_vocabulary(load: Load, grammar: str, text: str) -> None:
    tokenizer = load("llama-bpe")
    matcher = Grammar.from_gbnf(grammar, tokenizer).matcher()
    for i, id in enumerate(tokenizer.encode_plain(text, start=False)):
        if i % 40 == 0:
            logits = np.zeros(tokenizer.n_vocab, np.float32)
            matcher.mask(logits)
            assert logits[id] == 0
            assert np.isneginf(logits).any()
        matcher.accept(id)
    assert matcher.accepting


@pytest.mark.slow
@pytest.mark.parametrize("n", [40, 100])
def test_nested_optional_groups(bytes_tokenizer: Tokenizer, n: int) -> None:
    nested = '("a" ' * n + '"b"' + ")?" * n
    for grammar in (f"root ::= {nested}", f'root ::= {nested} | "(" root ")"'):
        matcher = Grammar.from_gbnf(grammar, bytes_tokenizer).matcher()
        for letter in "a" * n + "b":
            assert not matcher.done
            matcher.accept(3 + ord(letter))
        assert matcher.accepting


def test_rules_that_lead_too_far(bytes_tokenizer: Tokenizer) -> None:
    """llguidance's own stack ends: the process would."""
    chain = "\n".join(f'a{i} ::= "x" a{i + 1} "z"' for i in range(3000))
    with pytest.raises(
        GrammarError, match=r"a chain of 3002 rules that refer to each other \(at most 300\)"
    ):
        Grammar.from_gbnf(f'root ::= a0\n{chain}\na3000 ::= "y"', bytes_tokenizer)
