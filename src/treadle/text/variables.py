"""Which variables a chat template reads: to tell one from a misspelt setting."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.text.template import ChatTemplate

OURS = frozenset(("messages", "add_generation_prompt"))  # said by the conversation itself


def check_own(template: Mapping[str, Any] | None) -> dict[str, Any]:
    """``chat(template=...)``: variables by name. Raises TreadleError for what is none."""
    if not isinstance(template, Mapping | None):
        raise TreadleError(f"template is {type(template).__name__}: expected variables by name")
    for name in template or ():
        if not isinstance(name, str) or name in OURS:
            raise TreadleError(f"template: {name!r:.40} is no variable that a caller sets")
    return dict(template or {})


def check_variables(template: ChatTemplate, names: Iterable[str], settings: Iterable[str]) -> None:
    """Raise TypeError for one of ``names`` that the template does not read: a slip, silent
    otherwise. ``settings`` are the other names that might have been meant.

    Raises TemplateError for a template that cannot be parsed.
    """
    read = template.variables() - OURS
    for name in names:
        if name not in read:
            near = get_close_matches(name, [*settings, *read], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"chat() got an unexpected keyword argument {name!r}: neither a setting of "
                f"generate() nor a variable of this model's chat template{hint}"
            )
