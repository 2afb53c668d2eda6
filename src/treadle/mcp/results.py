"""Results of tools as texts for the model."""

from __future__ import annotations

import json
from typing import Any

from treadle.base.humanize import n_bytes

KINDS = {"image": "a picture", "audio": "a sound", "resource": "a file", "resource_link": "a link"}


def text_of(result: Any) -> str:
    """Return a result of the ``mcp`` package as one text. A part that is not text is described,
    such as "[a picture, not shown: image/png, 12 KiB]".
    """
    parts = []
    for block in result.content:
        if block.type == "text":
            parts.append(block.text)
        else:
            data = getattr(block, "data", None)
            size = f", {n_bytes(len(data) * 3 // 4)}" if isinstance(data, str) else ""
            kind = getattr(block, "mime_type", None) or getattr(block, "uri", None) or ""
            name = KINDS.get(block.type, block.type)
            resource = getattr(block, "resource", None)
            text = getattr(resource, "text", None)
            parts.append(text if isinstance(text, str) else f"[{name}, not shown: {kind}{size}]")
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts)
    return f"error: {text}" if result.is_error else text
