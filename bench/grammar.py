"""The time that a grammar takes beside the model: `python bench/grammar.py MODEL`.

Prints one line for each case: milliseconds to compile, and of the masks along a text that the
grammar allows: the first, the median and the slowest. The vocabulary is the model's; 128,256 tokens
are a hard case.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import treadle
from treadle.grammar.grammar import Grammar

CASES: dict[str, tuple[str, str]] = {
    "CSV": (
        'root ::= row ("\\n" row)*\nrow ::= field ("," field)*\nfield ::= [^",\\n]*',
        "name,place of birth\nAda Lovelace,London\n" * 20,
    ),
    "nested tags": (
        'root ::= node*\nnode ::= "<b>" node* "</b>" | [^<>]+',
        "some <b>bold and <b>bolder</b></b> text " * 20,
    ),
    "right recursion": ('root ::= "a" s\ns ::= [a-z] s | ""', "abcdefgh" * 200),
    "arithmetic": (
        'root ::= e\ne ::= t ([-+*/] t)*\nt ::= [a-z]+ | [0-9]+ | "(" e ")"',
        "a+2*(3+b*(c-d))" + "+1" * 50,
    ),
}


def main() -> None:
    """Run every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a GGUF file; only its vocabulary is used")
    tokenizer = treadle.load(parser.parse_args().model).tokenizer
    Grammar.from_regex("a", tokenizer).matcher()  # llguidance's tree of the vocabulary
    for name, (grammar, text) in CASES.items():
        start = time.perf_counter()
        matcher = Grammar.from_gbnf(grammar, tokenizer).matcher()
        compile_ms = 1e3 * (time.perf_counter() - start)
        times: list[float] = []
        for token in tokenizer.encode_plain(text, start=False):
            logits = np.zeros(tokenizer.n_vocab, np.float32)
            start = time.perf_counter()
            matcher.mask(logits)
            times.append(1e3 * (time.perf_counter() - start))
            matcher.accept(token)
        print(
            f"{tokenizer.n_vocab:>7} {name:<16}{compile_ms:8.1f} ms  masks: first {times[0]:.1f}, "
            f"median {statistics.median(times):.2f}, max {max(times):.1f} ms"
        )


if __name__ == "__main__":
    main()
