"""Fields of answers that several protocols have: timings, prefix reuse, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.server.requests.request_stream import OutputStream, RequestStream


def reuse(text: OutputStream) -> dict[str, Any]:
    """Return the ``PrefixHit``: the cached part of a prompt, and where and why reuse stopped."""
    use = text.answer.timings.cache
    return {"memory": use.memory, "files": use.files, "left_at": use.left_at, "why": use.why}


def timings(text: OutputStream) -> dict[str, Any]:
    """Return timings of one output under llama.cpp's names, in milliseconds. ``cache`` is treadle's
    own.
    """
    t = text.answer.timings
    read = t.n_prompt - t.n_cached
    written = t.n_generated
    return {
        "cache_n": t.n_cached,
        "prompt_n": read,
        "prompt_ms": 1e3 * t.prefill_s,
        "prompt_per_token_ms": 1e3 * t.prefill_s / read if read else 0.0,
        "prompt_per_second": t.prefill_tok_s,
        "predicted_n": written,
        "predicted_ms": 1e3 * t.decode_s,
        "predicted_per_token_ms": 1e3 * t.decode_s / written if written else 0.0,
        "predicted_per_second": t.decode_tok_s,
        "draft_n": t.n_drafted,
        "draft_n_accepted": t.n_accepted,
        "cache": reuse(text) | {"piece": _piece(text)},
    }


def warnings(call: RequestStream) -> dict[str, list[str]]:
    """Return warnings about ignored fields and about schema parts that are not enforced."""
    found = [*call.asked.ignored, *call.asked.planned.warnings]
    return {"warnings": found} if found else {}


def _piece(text: OutputStream) -> str:
    """Return the text of the first prompt token that was not cached."""
    token = text.answer.timings.cache.token
    return "" if token is None else text.answer.tokenizer.piece(token)
