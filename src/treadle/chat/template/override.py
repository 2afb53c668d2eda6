"""Chat template that the user chose in place of the model file's default: a built-in name, a file,
source text, or the name of another template in the model's file.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from treadle.chat.template.role_formats import NAMES, find_named
from treadle.chat.template.template import MAX_SOURCE, OWN, ChatTemplate, ChosenTemplate
from treadle.errors import TemplateError

_MARKS = ("{{", "{%", "{#")  # every template has one of these, no file name does
_NAME = re.compile(r"\w[\w-]*", re.ASCII)  # name of a template in the model's file: tool_use
_PLAIN = "treadle asks"  # content of a test message: no template has these words


def choose_template(given: str | os.PathLike[str]) -> ChosenTemplate:
    """Return the template that ``given`` names or is: a built-in name, a path, template source, or
    the name of a template in the model's file, which ``load_template`` resolves.

    Raises TemplateError for a misspelt name, an unreadable file, and a template that does not
    compile (with the line).
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise TemplateError(f"chat_template={given!r:.80}: expected a file or a name: {_names()}")
    named = find_named(given)
    if named is not None:
        return ChosenTemplate(named.source, f"built-in {named.name}", named.name, named.stop)
    if isinstance(given, str) and any(mark in given for mark in _MARKS):
        return _checked(ChosenTemplate(given, "text that was given"), "chat_template")
    path = Path(given)
    if isinstance(given, str) and _may_be_named(given):
        return ChosenTemplate("", f"{given} of {OWN}", named=given)
    return _checked(ChosenTemplate(_read(path), f"file {path.name}"), str(path))


def check_plain(template: ChatTemplate) -> None:
    """Raise TemplateError if the template raises on a single user message or its prompt lacks that
    message's text: no conversation is possible with it.
    """
    try:
        text = template.render([{"role": "user", "content": _PLAIN}])
    except TemplateError as error:
        raise TemplateError(
            f"{error} (from {template.origin}; the conversation was one message of the user's)"
        ) from None
    if _PLAIN not in text:
        raise TemplateError(
            f"chat template from {template.origin}: its prompt leaves out what the user says: "
            "expected a template that writes the contents of messages"
        )


def _may_be_named(given: str) -> bool:
    """Whether ``given`` can be the name of a template in the model's file: there is no file at this
    path, and it does not resemble a built-in name.
    """
    if os.path.lexists(given) or not _NAME.fullmatch(given):
        return False
    return not get_close_matches(given, NAMES, n=1)


def _read(path: Path) -> str:
    """Return the text of a template file, with Windows line ends converted. Raises TemplateError if
    it cannot be read.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(MAX_SOURCE + 1)
    except FileNotFoundError:
        near = get_close_matches(str(path), NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TemplateError(
            f"chat template {str(path)!r} is neither a file nor a built-in template{hint}: "
            f"expected a file or one of {_names()}"
        ) from None
    except UnicodeDecodeError as error:
        raise TemplateError(
            f"{path}: byte {error.start} is not UTF-8: expected a text file"
        ) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TemplateError(f"{path}: cannot be read: {why}") from None


def _names() -> str:
    return ", ".join(NAMES)


def _checked(chosen: ChosenTemplate, where: str) -> ChosenTemplate:
    """Return ``chosen`` if it compiles; else raise TemplateError, which begins with ``where``."""
    try:
        if not chosen.source.strip():
            raise TemplateError("it is empty: expected a chat template (jinja2)")
        ChatTemplate(chosen.source).check()
    except TemplateError as error:
        raise TemplateError(f"{where}: {error}") from None
    return chosen
