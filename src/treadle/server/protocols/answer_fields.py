"""Fields of answers that several protocols have: timings, prefix reuse, warnings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from treadle.chat.media_parts import MARKER
from treadle.media.sound_buffer import RATE

if TYPE_CHECKING:
    from treadle.scheduler.request import MediaUsage
    from treadle.server.requests.request_stream import OutputStream, RequestStream


def reuse(output: OutputStream) -> dict[str, Any]:
    """Return how much of the output's prompt was cached: tokens from ``memory`` and from ``files``;
    ``left_at``, the index of the prompt token at which reuse stopped (None if it did not), and
    ``why``. ``state``, the origin of the reused layer state, only for models whose layers keep one.
    """
    use = output.answer.timings.cache
    told = {"memory": use.memory, "files": use.files, "left_at": use.left_at, "why": use.why}
    return told if use.state is None else {**told, "state": use.state}


def timings(output: OutputStream) -> dict[str, Any]:
    """Return timings of one output under llama.cpp's names, in milliseconds. ``cache`` and the
    ``media_...`` fields of a prompt with pictures or sounds are treadle's own.
    """
    t = output.answer.timings
    media = output.answer.media
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
        **({"media_n": len(media), "media_ms": 1e3 * t.media_s} if media else {}),
    }


def media_usage(media: Iterable[MediaUsage]) -> dict[str, list[dict[str, Any]]]:
    """Return ``images`` and ``sounds`` of a prompt, lists of objects; {} without any. Each object
    has the number of tokens, and pixels or seconds. ``resized_...``: the size in which the model
    sees a picture; coordinates in its output may be of that size.
    """
    made: dict[str, list[dict[str, Any]]] = {}
    for each in media:
        height, width = each.size
        if each.kind == "image":
            made.setdefault("images", []).append(
                {
                    "tokens": each.n_tokens,
                    "width": width,
                    "height": height,
                    "resized_width": each.resized[1],
                    "resized_height": each.resized[0],
                }
            )
        else:
            sound = {"tokens": each.n_tokens, "seconds": width / RATE}
            made.setdefault("sounds", []).append(sound)
    return made


def media_tokens(media: Iterable[MediaUsage]) -> dict[str, int]:
    """Return OpenAI's ``image_tokens`` and ``audio_tokens``: how many of a prompt's tokens stand
    for pictures and for sounds.
    """
    made: dict[str, int] = {}
    for each in media:
        name = f"{each.kind}_tokens"
        made[name] = made.get(name, 0) + each.n_tokens
    return made


def warnings(stream: RequestStream) -> dict[str, list[str]]:
    """Return ``{"warnings": [...]}`` about ignored fields and about schema parts that are not
    enforced; {} without any.
    """
    found = [*stream.generation.ignored, *stream.generation.planned.warnings]
    return {"warnings": found} if found else {}


def _piece(output: OutputStream) -> str:
    """Return the text of the first prompt token that was not cached, the marker for a row of a
    picture or sound; "" if all tokens were cached.
    """
    token = output.answer.timings.cache.token
    tokenizer = output.answer.tokenizer
    if token is not None and token >= tokenizer.n_vocab:  # a row of a picture or sound
        return MARKER
    return "" if token is None else tokenizer.piece(token)
