"""``repr`` of a model, and its table in a notebook."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from treadle.base.humanize import n_bytes, n_weights

if TYPE_CHECKING:
    from pathlib import Path

    from treadle.engine.engine import Engine
    from treadle.files.tensor import Tensor
    from treadle.kvcache.cache import KVCache


def one_line(path: Path, engine: Engine) -> str:
    """Return a model's ``repr``, such as ``Model('tiny.gguf', llama, 1.1B parameters, Q4_K, 637
    MiB, 4 threads, ...)``.
    """
    facts = card(path, engine)
    if "state" in facts:
        return f"Model({facts['file']!r}, closed)"
    return (
        "Model({file!r}, {architecture}, {parameters} parameters, {format}, {size}, "
        "{threads} thread{s}, context of {context})"
    ).format_map(facts | {"s": "s" * (facts["threads"] != "1")})


def table(path: Path, engine: Engine) -> str:
    """Return a model's facts as an HTML table. Names come from files, so everything is escaped."""
    from html import escape  # 5 ms, and only notebooks need it

    facts = card(path, engine)
    name = engine.gguf.metadata.get("general.name")
    title = name if isinstance(name, str) and name.strip() else path.stem
    if "state" not in facts:
        facts["trained context"] = f"{engine.config.n_ctx_train} tokens"
    rows = "".join(
        f"<tr><th style='text-align:left;font-weight:normal;opacity:0.65'>{escape(key)}</th>"
        f"<td style='text-align:left'>{escape(value)}</td></tr>"
        for key, value in facts.items()
    )
    caption = f"<b>{escape(title)}</b> <span style='opacity:0.65'>treadle.Model</span>"
    return (
        "<table style='border:1px solid rgba(128,128,128,0.4)'>"
        f"<caption style='caption-side:top;text-align:left'>{caption}</caption>{rows}</table>"
    )


def bytes_by_type(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Return the bytes of the tensors of each type, largest first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.type_name] += tensor.n_bytes
    return dict(sizes.most_common())


def room(cache: KVCache) -> str:
    """Return the type and capacity of the KV cache as text, such as ``f16, 88.0 MiB for 4096
    tokens``.
    """
    return f"{cache.kv}, {n_bytes(cache.n_bytes)} for {cache.n_tokens} tokens"


def card(path: Path, engine: Engine) -> dict[str, str]:
    """Return facts about the model of ``engine``, opened from ``path``, as texts by name; only
    "file" and "state" for a closed one.
    """
    facts = {"file": path.name}
    tensors = engine.gguf.tensors.values()
    if not tensors:
        return facts | {"state": "closed"}
    n_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    return facts | {
        "architecture": engine.config.arch.name,
        "parameters": n_weights(n_parameters),
        "format": next(iter(bytes_by_type(tensors))),
        "size": n_bytes(engine.gguf.n_bytes),
        "layers": str(engine.config.n_layer),
        "vocabulary": f"{engine.config.n_vocab} tokens",
        "context": f"{engine.n_ctx} tokens",
        "keys and values": room(engine.cache),
        "threads": str(engine.device.n_threads),
        "instruction set": engine.device.isa.name,
    }
