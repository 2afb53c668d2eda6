"""Which variables a chat template reads: to tell one from a misspelt setting."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treadle.text.template import ChatTemplate


def check_variables(template: ChatTemplate, names: Iterable[str], settings: Iterable[str]) -> None:
    """Raise TypeError for one of ``names`` that the template does not read: a slip, silent
    otherwise. ``settings`` are the other names that might have been meant.
    """
    sources = [template.source, *filter(None, [template.tool_source])]
    read = frozenset[str]().union(*map(template_variables, sources))
    for name in names:
        if name not in read:
            near = get_close_matches(name, [*settings, *read], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"chat() got an unexpected keyword argument {name!r}: neither a setting of "
                f"generate() nor a variable of this model's chat template{hint}"
            )


@lru_cache(maxsize=64)
def template_variables(source: str) -> frozenset[str]:
    """The names that a template takes from whoever renders it.

    The template is parsed, not run. Of one that jinja2 cannot parse every word counts: what is
    wrong with it is told when it is rendered.
    """
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))
    except Exception:  # tags of its own, or nested too deep: jinja2 raises a dozen kinds
        return frozenset(re.findall(r"[^\W\d]\w*", source))
