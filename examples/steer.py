"""A style as a knob: `python examples/steer.py [MODEL]`.

A control vector is made from pairs of programs that differ in one thing: one of each pair has
docstrings. The same prompts are then continued with several strengths of it, all in one batch, and
the answers with a docstring are counted.
"""

from __future__ import annotations

import sys

import treadle

VERBS = ("load", "parse", "count", "merge", "find", "split", "read", "write", "join", "sort")
NOUNS = ("path", "text", "items", "rows", "names")
HEADS = [f"def {verb}({NOUNS[i % 5]}, {NOUNS[(i + 1) % 5]}):\n" for i, verb in enumerate(VERBS)]
PROMPTS = [
    *("def area(width, height):\n", "def greet(name):\n", "def load_config(path):\n"),
    *("def total_price(orders):\n", "def is_empty(items):\n", "def to_upper(text):\n"),
    *("def first_line(file):\n", "def remove_all(names):\n"),
]
STRENGTHS = (-4.0, -2.0, 0.0, 2.0)
LAYERS = 3, 7  # the middle of the packaged model; first layers read, last ones write


def program(first: int, documented: bool) -> str:
    """Two functions, and the head of a third, whose body the model would write next."""
    text = ""
    for i in (first + 3, first + 5):
        noun = NOUNS[i % 5]
        text += HEADS[i % 10]
        text += f'    """Return the {noun} of it."""\n' if documented else ""
        text += f"    return {noun}.{VERBS[first]}()\n\n\n"
    return text + HEADS[first]


def documented(model: treadle.Model) -> treadle.ControlVector:
    """The direction from programs without docstrings to those with some."""
    numbers = range(len(VERBS))
    with_them, without = ([program(i, kind) for i in numbers] for kind in (True, False))
    return treadle.make_control_vector(model, with_them, without, method="mean", name="documented")


if __name__ == "__main__":
    with treadle.load(*sys.argv[1:2]) as model:
        vector = documented(model)
    with treadle.load(
        *sys.argv[1:2], control_vectors=[(vector, 0.0)], control_vector_layers=LAYERS
    ) as model:
        answers = {
            strength: [
                model.generate(
                    prompt,
                    max_tokens=24,
                    temperature=0,
                    control_vectors={"documented": strength},
                )
                for prompt in PROMPTS
            ]
            for strength in STRENGTHS
        }
        for strength, each in answers.items():
            texts = [answer.finish() for answer in each]
            n = sum('"""' in text for text in texts)
            print(f"{strength:+.0f}: {n} of {len(texts)} have a docstring, such as", flush=True)
            print(PROMPTS[0] + texts[0].rstrip())
