"""Log-probabilities of prompts, for ``/v1/completions`` with ``echo`` and ``logprobs``."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import numpy as np

from treadle.engine.engine import OUTPUTS
from treadle.sampling.logprobs import TokenLogprob, row_logprobs
from treadle.server.requests.request_stream import RequestStream
from treadle.server.requests.service import Service

if TYPE_CHECKING:
    from treadle.api.session import Session


async def measure_prompts(service: Service, stream: RequestStream) -> None:
    """Compute the log-probabilities of the prompts' tokens, if ``echo`` and ``logprobs`` are
    requested, and store them in ``generation.more["measured"]``, a list for each prompt.
    """
    more = stream.generation.more
    n_top = stream.generation.settings.get("logprobs")
    if more["echo"] is None or n_top is None:
        return
    try:
        more["measured"] = [
            await _measured(service, ids, n_top) for ids in stream.generation.prompts
        ]
    except BaseException:
        stream.close()
        raise


async def _measured(service: Service, ids: list[int], n_top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token of the prompt ``ids``, with ``n_top`` alternatives;
    NaN for the first. Steps of the scheduler run between batches of the prompt.
    """
    model = service.model
    submit = service.engine.submit

    def begin() -> Session:
        with model.engine.lock:
            service.engine.scheduler.make_room(len(ids))
            session = model.session()
            model.engine.cache.reserve(session.seq, len(ids))
        return session

    raw = model.tokenizer.token_bytes(ids[0])
    result = [TokenLogprob(ids[0], raw.decode("utf-8", "replace"), raw, math.nan)]
    session = await asyncio.wrap_future(submit(begin))
    try:
        for at in range(0, len(ids) - 1, OUTPUTS):
            some = ids[at : min(at + OUTPUTS, len(ids) - 1)]

            def run(some: list[int] = some) -> np.ndarray:
                return session.logits(some)

            rows = await asyncio.wrap_future(submit(run))
            following = ids[at + 1 : at + 1 + len(some)]
            result += await asyncio.to_thread(row_logprobs, rows, following, n_top, model.tokenizer)
    finally:  # explicit: a stopping server would not do it
        await asyncio.wrap_future(submit(session.close))
    return result
