"""A chat template that is chosen in place of a model file's own: by name, or as a file."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from treadle.chat.template.builtin_templates import BUILT_INS
from treadle.chat.template.template import MAX_SOURCE, ChatTemplate, ChosenTemplate
from treadle.errors import TemplateError

NAMES = tuple(dict.fromkeys(each.name for each in BUILT_INS))
_MARKS = ("{{", "{%", "{#")  # some template text has one of them, no file's name does


def choose_template(given: str | os.PathLike[str]) -> ChosenTemplate:
    """The template that ``given`` means: the name of a built-in one, a file, or a template's text.

    Raises TemplateError for a name that is none, a file that cannot be read, and a template that
    does not compile, with its line.
    """
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise TemplateError(f"chat_template={given!r:.80}: expected a file or a name: {_names()}")
    named = next((each for each in BUILT_INS if each.name == given), None)
    if named is not None:
        return ChosenTemplate(named.source, f"built-in {named.name}", named.name, named.stop)
    if isinstance(given, str) and any(mark in given for mark in _MARKS):
        return _checked(ChosenTemplate(given, "text that was given"), "chat_template")
    path = Path(given)
    return _checked(ChosenTemplate(_read(path), f"file {path.name}"), str(path))


def _read(path: Path) -> str:
    """The text of a template's file; Windows' ends of lines as others have them."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read(MAX_SOURCE + 1)
    except FileNotFoundError:
        near = get_close_matches(str(path), NAMES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise TemplateError(
            f"chat template {str(path)!r}: no file, and no name of a built-in template{hint}: "
            f"expected a file or one of {_names()}"
        ) from None
    except UnicodeDecodeError as error:
        raise TemplateError(f"{path}: byte {error.start} is not UTF-8: expected a text") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise TemplateError(f"{path}: cannot be read: {why}") from None


def _names() -> str:
    return ", ".join(NAMES)


def _checked(chosen: ChosenTemplate, where: str) -> ChosenTemplate:
    """``chosen``, which compiles. Raises TemplateError."""
    try:
        if not chosen.source.strip():
            raise TemplateError("it is empty: expected a chat template (jinja2)")
        ChatTemplate(chosen.source).check()
    except TemplateError as error:
        raise TemplateError(f"{where}: {error}") from None
    return chosen
