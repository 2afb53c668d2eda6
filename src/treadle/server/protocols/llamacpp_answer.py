"""llama.cpp's result object: that of ``/completion``, and ``__verbose`` in responses of OpenAI's
endpoints.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from treadle.server.protocols.answer_fields import media_usage, timings, warnings
from treadle.server.requests.generation_request import room
from treadle.server.requests.request_media import prompt_text

if TYPE_CHECKING:
    from treadle.sampling import Sampling
    from treadle.scheduler.output import RequestOutput
    from treadle.server.requests.request_stream import RequestStream, StreamPiece
    from treadle.server.requests.service import Service

STOP_TYPES = {"length": "limit", "context": "limit"}


def piece_fields(piece: StreamPiece, *, tokens: bool = True) -> dict[str, Any]:
    """Return the fields of llama.cpp's result for a new piece of output: its text, token ids (empty
    unless ``tokens``), whether it is the last, token counts so far, and log-probabilities if
    requested.
    """
    result: dict[str, Any] = {
        "index": piece.output.index,
        "content": piece.content,
        "tokens": piece.ids if tokens else [],
        "stop": piece.finish_reason is not None,
        "id_slot": piece.output.slot,
        "tokens_predicted": len(piece.output.answer.ids),
        "tokens_evaluated": piece.output.answer.timings.n_prompt,
    }
    if piece.output.request.n_top is not None:
        result["completion_probabilities"] = [entry.as_dict() for entry in piece.logprobs]
    return result


def final_fields(service: Service, stream: RequestStream, piece: StreamPiece) -> dict[str, Any]:
    """Return the fields that only a whole result or a stream's last event has: settings, stop
    reason, timings.
    """
    answer = piece.output.answer
    word = piece.output.answer.stopped_by
    kind = STOP_TYPES.get(str(piece.finish_reason), "word" if word else "eos")
    limit = stream.generation.settings["max_tokens"]
    sampling = stream.generation.settings["sampling"]
    return {
        "model": service.name,
        "generation_settings": {
            **sampling_dict(sampling),
            "seed": piece.output.request.sampler.seed,
            "max_tokens": -1 if limit is None else limit,
            "n_predict": -1 if limit is None else limit,
            "stop": stream.generation.settings["stop"],
            "stream": stream.is_streamed,
        },
        "stop_type": kind,
        "stopping_word": word,
        "truncated": answer.finish_reason != "stop" and _is_full(service, answer),
        "has_new_line": "\n" in service.model.detokenize(answer.ids),
        "tokens_cached": answer.timings.n_cached,
        "timings": timings(piece.output),
        **media_usage(answer.media),
        **warnings(stream),
    }


def _is_full(service: Service, answer: RequestOutput) -> bool:
    """Return whether the prompt and the output ``answer`` together fill the context."""
    return answer.timings.n_prompt + len(answer.ids) >= room(service.model)


def verbose(service: Service, stream: RequestStream, piece: StreamPiece) -> dict[str, Any]:
    """Return ``{"__verbose": ...}``, llama.cpp's whole result, for ``piece``, the last of an
    output, if the request asked for it; else {}.
    """
    if not stream.generation.more["verbose"]:
        return {}
    prompt = prompt_text(stream.generation.prompts[piece.output.prompt], service.model)
    return {
        "__verbose": {
            **piece_fields(piece),
            **final_fields(service, stream, piece),
            "prompt": prompt,
        }
    }


def sampling_dict(sampling: Sampling) -> dict[str, Any]:
    """Return sampling settings as JSON values: a custom sampler is left out, -inf becomes false."""
    result = dataclasses.asdict(dataclasses.replace(sampling, custom=None))
    del result["custom"]
    result["samplers"] = list(sampling.samplers)
    result["dry_sequence_breakers"] = list(sampling.dry_sequence_breakers)
    result["logit_bias"] = [
        [token, False if amount == -math.inf else amount]
        for token, amount in sampling.logit_bias.items()
    ]
    result["seed"] = -1 if sampling.seed is None else sampling.seed
    return result
