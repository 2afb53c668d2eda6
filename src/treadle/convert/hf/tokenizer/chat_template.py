"""Chat templates of a Hugging Face model, from the four places that have held them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from treadle.errors import FileError, why
from treadle.files.safetensors import read_json

_KEY = "tokenizer.chat_template"
_MAX_TEMPLATE = 4 << 20  # bytes; the longest known one has 30,000


def read_templates(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return ``tokenizer.chat_template``, and for further templates
    ``tokenizer.chat_template.NAME`` and the list of names ``tokenizer.chat_templates``; {} without
    any.

    ``settings`` is tokenizer_config.json. As in transformers, chat_template.jinja and
    additional_chat_templates/NAME.jinja take precedence over it, and it over chat_template.json.
    Raises FileError.
    """
    found: dict[str, str] = {}
    processor = folder / "chat_template.json"
    if os.path.lexists(processor):
        found |= _templates(read_json(processor).get("chat_template"), processor)
    found |= _templates(settings.get("chat_template"), folder / "tokenizer_config.json")
    more = folder / "additional_chat_templates"
    files = {path.stem: path for path in sorted(more.glob("*.jinja"))} if more.is_dir() else {}
    files = {"default": folder / "chat_template.jinja", **files}
    found |= {name: _read(path) for name, path in files.items() if os.path.lexists(path)}
    keys: dict[str, Any] = {_KEY: found.pop("default")} if "default" in found else {}
    if found:
        keys["tokenizer.chat_templates"] = list(found)
    return keys | {f"{_KEY}.{name}": text for name, text in found.items()}


def _templates(value: Any, path: Path) -> dict[str, str]:
    """Return the templates in ``value``, one text or a list of named ones, by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    found: dict[str, str] = {}
    for item in value if isinstance(value, list) else [None]:
        name, text = (item.get("name"), item.get("template")) if isinstance(item, dict) else (0, 0)
        if not isinstance(name, str) or not isinstance(text, str):
            what = f"is {value!r:.60}"
            raise FileError(what, path=path, where="chat_template", expected="a template or a list")
        found[name] = text
    return found


def _read(path: Path) -> str:
    try:
        with path.open("rb") as f:
            raw = f.read(_MAX_TEMPLATE + 1)
        if len(raw) > _MAX_TEMPLATE:
            raise FileError("too large", path=path, expected=f"at most {_MAX_TEMPLATE} bytes")
        return raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise FileError(
            f"cannot be read: {why(e)}", path=path, expected="a template, in UTF-8"
        ) from e
