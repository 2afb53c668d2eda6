"""Each line of standard input with "spam" or "ham" before it, in a shell pipe:

    cat messages.txt | python examples/spam.py [MODEL] | grep ^spam

A grammar leaves the model no other words. The examples before a message are read once: all prompts
begin alike. Seconds go to standard error. The packaged model is quick, and too small to judge: give
one that follows instructions.
"""

from __future__ import annotations

import sys
import time

import treadle

EXAMPLES = """\
Message: You have won! Send 100 dollars to claim your prize.
Kind: spam
Message: The meeting is at ten tomorrow.
Kind: ham
"""
GRAMMAR = 'root ::= "spam" | "ham"'
LONGEST = 800  # bytes, and so tokens at most: with the examples they fit a context of 1024


def kind_of(message: str, model: treadle.Model) -> str:
    beginning = message.encode(errors="replace")[:LONGEST].decode(errors="ignore")
    prompt = f"{EXAMPLES}Message: {beginning}\nKind: "
    return model.generate(prompt, grammar=GRAMMAR, temperature=0).finish()


if __name__ == "__main__":
    with treadle.load(*sys.argv[1:2]) as model:
        for line in sys.stdin:
            began = time.perf_counter()
            print(f"{kind_of(line.strip(), model)}\t{line.strip()}", flush=True)
            print(f"{time.perf_counter() - began:.3f} s", file=sys.stderr)
