"""Answers and log-probabilities as HTML, and a notebook's display of an answer while it is
generated.

IPython calls ``_ipython_display_`` of a cell's value; so IPython is imported here only if it
already runs. Colours are translucent, so that they suit light and dark themes.
"""

from __future__ import annotations

import math
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.api.generation import Generation
    from treadle.chat.tools.output import ToolCall
    from treadle.sampling.logprobs import TokenLogprob

INTERVAL_S = 0.05  # between two updates: each sends the whole text
TEXT_STYLE = "white-space:pre-wrap;overflow-wrap:anywhere"
NOTE_STYLE = "opacity:0.65;font-size:85%"
SURPRISE = 5.0  # nats: a token of probability e^-5 has the strongest colour
STRONGEST = 0.6  # opacity of that colour
COLOUR = "230,110,0"

Bundle = dict[str, str]


def display(generation: Generation) -> None:
    """Show an answer while it is generated, to its end: in a notebook as one display that is
    updated, on IPython's terminal as text.
    """
    from IPython.core.getipython import get_ipython
    from IPython.display import display as show

    if not hasattr(get_ipython(), "kernel"):
        for piece in generation:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        return
    handle = show(bundle(generation), raw=True, display_id=True)
    follow(generation, lambda data: handle.update(data, raw=True))


def follow(
    generation: Generation, update: Callable[[Bundle], None], clock: Callable[[], float] = monotonic
) -> None:
    """Run a generation to its end; call ``update`` with its MIME bundle at most every INTERVAL_S
    seconds of ``clock``, and once at the end. Raises the generation's errors, after that last
    update.
    """
    shown_at = clock()
    try:
        for _ in pieces(generation):
            if clock() - shown_at >= INTERVAL_S:
                update(bundle(generation))
                shown_at = clock()
    finally:
        update(bundle(generation))


def pieces(generation: Generation) -> Iterator[object]:
    """Iterate over all pieces of an answer; those of a ``Reply`` include reasoning and calls."""
    # Its class is not imported: the modules would import each other.
    parts: Callable[[], Iterator[object]] | None = getattr(generation, "parts", None)
    return generation if parts is None else parts()


def bundle(generation: Generation) -> Bundle:
    """Return the answer so far as a MIME bundle: HTML and plain text."""
    return {"text/html": answer_html(generation), "text/plain": generation.text}


def answer_html(generation: Generation) -> str:
    """Return the answer so far as HTML: reasoning, text, calls, and how it ended. The tokens of a
    finished answer with log-probabilities are coloured by them.
    """
    over = generation.finish_reason is not None
    blocks = []
    reasoning: str = getattr(generation, "reasoning", "")
    calls: Sequence[ToolCall] = getattr(generation, "calls", ())
    if reasoning:
        open_ = "" if over else " open"
        blocks.append(
            f"<details{open_}><summary style='{NOTE_STYLE}'>reasoning</summary>"
            f"<div style='{TEXT_STYLE};opacity:0.8'>{escape(reasoning)}</div></details>"
        )
    if over and generation.logprobs:
        blocks.append(tokens_html(generation.logprobs))
    elif generation.text:
        blocks.append(f"<div style='{TEXT_STYLE}'>{escape(generation.text)}</div>")
    for call in calls:
        line = escape(f"{call.name}({call.arguments})")
        blocks.append(f"<div style='{TEXT_STYLE}'><code>{line}</code></div>")
    blocks.append(f"<div style='{NOTE_STYLE}'>{escape(state_of(generation))}</div>")
    return f"<div>{''.join(blocks)}</div>"


def state_of(generation: Generation) -> str:
    """Return an answer's token count, finish reason and speed:
    ``12 tokens, ended by: length, 31.0 tokens/s``.
    """
    n = len(generation.ids)
    words = [f"{n} token{'' if n == 1 else 's'}"]
    if generation.finish_reason is not None:
        words.append(f"ended by: {generation.finish_reason}")
    if speed := generation.timings.decode_tok_s:
        words.append(f"{speed:.1f} tokens/s")
    return ", ".join(words)


def tokens_html(entries: Sequence[TokenLogprob]) -> str:
    """Return the tokens of ``entries`` as HTML. A token's colour is stronger for a larger -log p;
    its tooltip has its probability and the likeliest alternatives. Tokens that are parts of one
    character form one span.
    """
    spans = []
    for group in whole_characters(entries):
        surprise = -min(entry.logprob for entry in group)
        alpha = STRONGEST * min(surprise / SURPRISE, 1.0)
        text = b"".join(entry.bytes for entry in group).decode("utf-8", "replace")
        title = escape("\n\n".join(map(alternatives, group)), quote=True).replace("\n", "&#10;")
        spans.append(
            f"<span style='background:rgba({COLOUR},{alpha:.2f})' title=\"{title}\">"
            f"{escape(text)}</span>"
        )
    return f"<div style='{TEXT_STYLE}'>{''.join(spans)}</div>"


def alternatives(entry: TokenLogprob) -> str:
    """Return a text with a line for each of the likeliest tokens at the place of ``entry`` and for
    its own token, which has a mark: the probability in percent and the token.
    """
    rows = [(top.logprob, top.token, top.id == entry.id) for top in entry.top_logprobs]
    if not any(own for _, _, own in rows):
        rows.append((entry.logprob, entry.token, True))
    return "\n".join(
        f"{'▸' if own else ' '} {100 * math.exp(logprob):5.1f} %  {token!r}"
        for logprob, token, own in rows
    )


def whole_characters(entries: Iterable[TokenLogprob]) -> Iterator[list[TokenLogprob]]:
    """Group tokens so that the bytes of each group end where a UTF-8 character ends."""
    decoder = getincrementaldecoder("utf-8")("replace")
    group: list[TokenLogprob] = []
    for entry in entries:
        group.append(entry)
        decoder.decode(entry.bytes)
        unfinished = decoder.getstate()[0]  # bytes that begin a character
        if not unfinished:
            yield group
            group = []
    if group:
        yield group
