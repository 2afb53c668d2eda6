"""How the packaged model's texts end: of many seeds, which stop by themselves, and which loop.

    python bench/demo_seeds.py [--model FILE] [--prompt TEXT] [--seeds 40] [--repeat-penalty 1.1]

A text loops if its end repeats one piece of text at least MIN_TIMES, over at least MIN_CHARACTERS.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import treadle

MIN_TIMES = 3
MIN_CHARACTERS = 60


def loops(text: str) -> str:
    """The piece that the text's end repeats, the shortest one; "" where it does not loop."""
    for period in range(1, len(text) // MIN_TIMES + 1):
        piece = text[-period:]
        times = 1
        while text.endswith(piece, 0, len(text) - times * period):
            times += 1
        if times >= MIN_TIMES and times * period >= MIN_CHARACTERS:
            return piece
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", default="def fibonacci(n):")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--repeat-penalty", type=float, default=1.0)
    parser.add_argument("-v", "--verbose", action="store_true", help="print the texts")
    args = parser.parse_args()
    ends: Counter[str] = Counter()
    looping = []
    with treadle.load(args.model) as model:
        for seed in range(args.seeds):
            answer = model.generate(
                args.prompt,
                temperature=args.temperature,
                repeat_penalty=args.repeat_penalty,
                seed=seed,
            )
            text = answer.finish()
            piece = loops(text)
            ends[str(answer.finish_reason)] += 1
            looping += [seed] if piece else []
            print(f"{seed:3} {answer.finish_reason:8} {len(answer.ids):5} tokens  {piece!r:.60}")
            if args.verbose:
                print(args.prompt + text)
    print(f"{dict(ends)}; {len(looping)} of {args.seeds} loop: {looping}")


if __name__ == "__main__":
    main()
