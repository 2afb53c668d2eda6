"""What a model says of itself where Python shows it: on one line, and as a table in a notebook."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from treadle.words import n_bytes, n_weights

if TYPE_CHECKING:
    from treadle.model import Model


def one_line(model: Model) -> str:
    """``Model('tiny.gguf', llama, 1.1B parameters, Q4_K, 637 MiB, 4 threads, ...)``."""
    facts = card(model)
    if "state" in facts:
        return f"Model({facts['file']!r}, closed)"
    return (
        "Model({file!r}, {architecture}, {parameters} parameters, {format}, {size}, "
        "{threads} thread{s}, context of {context})"
    ).format_map(facts | {"s": "s" * (facts["threads"] != "1")})


def table(model: Model) -> str:
    """The same as HTML. Names come from files, so all of it is escaped."""
    from html import escape  # 5 ms of every start, and notebooks alone want it

    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(key)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for key, value in card(model).items()
    )
    return f"<table><caption>treadle.Model</caption>{rows}</table>"


def card(model: Model) -> dict[str, str]:
    """What a model is, in words: key to value."""
    facts, tensors = {"file": model.path.name}, model.gguf.tensors.values()
    if not tensors:
        return facts | {"state": "closed"}
    formats: Counter[str] = Counter()
    for tensor in tensors:
        formats[tensor.type_name] += tensor.n_bytes
    n_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    return facts | {
        "architecture": model.config.arch.name,
        "parameters": n_weights(n_parameters),
        "format": formats.most_common(1)[0][0],  # of most of the bytes
        "size": n_bytes(model.gguf.n_bytes),
        "layers": str(model.config.n_layer),
        "vocabulary": f"{model.config.n_vocab} tokens",
        "context": f"{model.n_ctx} tokens",
        "keys and values": model.engine.cache.kv,
        "threads": str(model.n_threads),
        "instruction set": model.isa.name,
    }
