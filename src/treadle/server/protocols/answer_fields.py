"""Fields of answers that several protocols have: timings, prefix reuse, warnings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treadle.server.requests.request_stream import OutputStream, RequestStream


def reuse(output: OutputStream) -> dict[str, Any]:
    """Return the ``PrefixHit``: the cached part of a prompt, and where and why reuse stopped."""
    use = output.answer.timings.cache
    return {"memory": use.memory, "files": use.files, "left_at": use.left_at, "why": use.why}


def timings(output: OutputStream) -> dict[str, Any]:
    """Return timings of one output under llama.cpp's names, in milliseconds. ``cache`` is treadle's
    own.
    """
    t = output.answer.timings
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
        "cache": reuse(output) | {"piece": _piece(output)},
    }


def warnings(stream: RequestStream) -> dict[str, list[str]]:
    """Return warnings about ignored fields and about schema parts that are not enforced."""
    found = [*stream.generation.ignored, *stream.generation.planned.warnings]
    return {"warnings": found} if found else {}


def _piece(output: OutputStream) -> str:
    """Return the text of the first prompt token that was not cached."""
    token = output.answer.timings.cache.token
    return "" if token is None else output.answer.tokenizer.piece(token)
