"""Defaults of a model's answers: chat template, its variables, reasoning, sampling, seed.

``load``, the commands and the server share one ``Defaults`` object. Settings of a single call
override them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from treadle.api.options import check_fields
from treadle.base.fast_dataclass import dataclass
from treadle.base.validate import flag, integer, positive
from treadle.errors import SamplingError, TreadleError, of_setting
from treadle.sampling import Sampling

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate, ChosenTemplate
    from treadle.files.gguf import GGUF

Given = Sampling | Mapping[str, Any] | None


@dataclass(frozen=True)
class Defaults:
    """Checked defaults, made by ``read_defaults``.

    ``template``: replaces the file's chat template, None keeps it; ``variables``: of the template;
    ``reasoning``: "auto", "on" or "off"; ``reasoning_budget``: tokens of reasoning, None for no
    limit, with ``reasoning_budget_message`` before its end; ``reasoning_preserve``: whether the
    template keeps the reasoning of earlier answers, None for its own default; ``sampling``: fields
    by name, over the file's recommended ones; ``whole``: a full ``Sampling``, if the caller gave
    one; ``max_tokens``: per answer, None for no limit; ``strict``: whether parts of messages that
    the model cannot read are refused.
    """

    template: ChosenTemplate | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning: str = "auto"
    reasoning_budget: int | None = None
    reasoning_budget_message: str = ""
    reasoning_preserve: bool | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    whole: Sampling | None = None
    max_tokens: int | None = None
    strict: bool = False

    def sampling_over(self, recommended: Sampling) -> Sampling:
        """Return the default sampling: the caller's whole ``Sampling``, else ``recommended``, with
        the fields that were given by name replaced.
        """
        return replace(self.whole or recommended, **self.sampling)

    def load_template(self, gguf: GGUF, arch: str) -> ChatTemplate:
        """Load the chat template of the model file ``gguf`` of architecture ``arch``, with these
        defaults.
        """
        from treadle.chat.template.template import load_template

        return load_template(
            gguf,
            arch,
            self.template,
            defaults=self.variables,
            reasoning=self.reasoning,
            preserve=self.reasoning_preserve,
        )


def read_defaults(
    *,
    chat_template: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    reasoning: str = "auto",
    reasoning_budget: int | None = None,
    reasoning_budget_message: str = "",
    reasoning_preserve: bool | None = None,
    sampling: Given = None,
    seed: int | None = None,
    max_tokens: int | None = None,
    strict: bool = False,
) -> Defaults:
    """Check the defaults of answers, arguments of ``load`` with the same names, before a model file
    is opened.

    Raises TemplateError for a missing or invalid template, SamplingError for values out of range,
    TypeError for a name that is no field of ``Sampling``, TreadleError for others.
    """
    if max_tokens is not None:
        positive("max_tokens", max_tokens)
    made: dict[str, Any] = {
        **_sampling(sampling, seed),
        "max_tokens": max_tokens,
        "strict": flag("strict", strict),
    }
    if reasoning_preserve is not None:
        made["reasoning_preserve"] = flag("reasoning_preserve", reasoning_preserve)
    if reasoning_budget is not None or reasoning_budget_message:
        budget = _budget(reasoning, reasoning_budget, reasoning_budget_message)
        made["reasoning_budget"] = budget or None  # 0 is kept as "off", which a call may override
        made["reasoning_budget_message"] = reasoning_budget_message
        reasoning = "off" if budget == 0 else reasoning
    if chat_template is None and not chat_template_kwargs and reasoning == "auto":
        return Defaults(**made)  # fast path: no further imports
    from treadle.chat.messages import plain
    from treadle.chat.template.override import choose_template
    from treadle.chat.template.variables import check_own, check_reasoning

    with of_setting("reasoning"):
        reasoning = check_reasoning(reasoning)
    with of_setting("chat_template_kwargs"):
        variables = plain(check_own(chat_template_kwargs, "chat_template_kwargs"))
    with of_setting("chat_template"):
        template = None if chat_template is None else choose_template(chat_template)
    return Defaults(template, variables, reasoning, **made)


def _budget(reasoning: str, budget: int | None, message: str) -> int | None:
    """Check ``reasoning_budget`` (``budget``) and its ``message`` for the setting ``reasoning``;
    return the budget in tokens, None for no limit, which -1 means too. Raises TreadleError.
    """
    if not isinstance(message, str):
        found = type(message).__name__
        raise TreadleError(f"reasoning_budget_message is {found}: expected a text")
    if budget is None:
        return None
    limit = integer("reasoning_budget", budget)
    if limit < -1:
        raise TreadleError(
            f"reasoning_budget={limit}: expected tokens, 0 for no reasoning, or -1 for no limit"
        )
    if limit == 0 and reasoning == "on":
        raise TreadleError("reasoning_budget=0 and reasoning='on' exclude each other")
    return None if limit == -1 else limit


def _sampling(given: Given, seed: int | None) -> dict[str, Any]:
    """Return the fields ``sampling`` and ``whole`` of ``Defaults``, by name. ``given``: a
    ``Sampling``, fields by name, or None; ``seed``: of every request, None for a random one. Raises
    SamplingError, TypeError, TreadleError.
    """
    if not isinstance(given, Sampling | Mapping | None):
        found = type(given).__name__
        raise SamplingError(f"sampling is {found}: expected a treadle.Sampling or a dict of fields")
    whole = given if isinstance(given, Sampling) else None
    named: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    check_fields(named, "sampling")
    if seed is not None:
        if named.get("seed", seed) != seed:
            raise TreadleError(f"seed={seed}, but sampling has seed {named['seed']}: set one")
        named["seed"] = seed
    Sampling(**named)  # raises for values out of range
    return {"sampling": named, "whole": whole}
