"""Each line of standard input with "spam" or "ham" before it, in a shell pipe:

    cat messages.txt | python examples/spam.py MODEL | grep ^spam

A small model answers the question "is this spam?" little better than a coin. It knows more than it
can say: the message is given to it behind a list of spam, and behind a list of other messages, and
its log-probabilities tell behind which of the two it is likelier. Of 40 mails, SmolLM2 with 135
million weights (`make chat` fetches it) puts a spam before a ham in 98 of 100 pairs this way, in 63
when it is asked. The lists were chosen with these mails (two other wordings gave 78 and 90), so on
other mail expect less. Examples of your own mail make it better. A model of some billion weights
can be asked: `model.chat(messages, grammar='root ::= "spam" | "ham"')`. The packaged one knows
Python alone. The difference, in nats, goes to standard error.
"""

from __future__ import annotations

import sys

import numpy as np

import treadle

SPAM = """\
Examples of spam:
- You have won! Send 100 dollars to claim your prize.
- Click here for cheap medicine, 80% off today only!
-"""
HAM = """\
Examples of messages from friends and colleagues:
- The meeting is at ten tomorrow.
- Could you buy milk on your way home?
-"""
LONGEST = 800  # bytes, and so tokens at most: with the examples they fit a context of 1024


def log_probability(text: str, beginning: str, model: treadle.Model) -> float:
    """Of ``text`` behind ``beginning``, in nats: the sum over its tokens."""
    before = model.tokenize(beginning)
    ids = model.tokenize(text, bos=False, special=False)
    rows = model.logits([*before, *ids])[len(before) - 1 : -1]  # a row is of the token after it
    rows = rows.astype(np.float64)
    likely = rows[np.arange(len(ids)), ids] - np.logaddexp.reduce(rows, axis=1)
    return float(likely.sum())


def spam_score(message: str, model: treadle.Model) -> float:
    """Above 0: likelier among spam. Move the border to suit what an error costs you."""
    text = " " + message.encode(errors="replace")[:LONGEST].decode(errors="ignore")
    return log_probability(text, SPAM, model) - log_probability(text, HAM, model)


if __name__ == "__main__":
    with treadle.load(*sys.argv[1:2]) as model:
        for line in sys.stdin:
            score = spam_score(line.strip(), model)
            print(f"{'spam' if score > 0 else 'ham'}\t{line.strip()}", flush=True)
            print(f"{score:+.1f}", file=sys.stderr)
