"""Variables of chat templates: those that a template reads, and those that switch reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate

OURS = frozenset(("messages", "add_generation_prompt"))  # set by the conversation itself

AUTO = "auto"
ON = "on"
OFF = "off"
REASONING = (AUTO, ON, OFF)
# Variables that switch reasoning in templates: their values for on and off.
SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),  # most families
    "thinking": (True, False),  # DeepSeek, Granite, Kimi K3
    "thinking_mode": ("enabled", "disabled"),  # MiniMax M3
    "thinking_option": ("on", "off"),  # Ling
    "thinking_budget": (-1, 0),  # Seed-OSS
}
EFFORT = "reasoning_effort"
EFFORT_TOKENS = {"none": 0, "minimal": 256, "low": 1024, "medium": 4096}
"""Reasoning budgets for templates that do not read ``reasoning_effort``; other values have none."""
# Values for off, best first: Cohere's and Mistral's, Hy3's, Solar's. gpt-oss has none.
_NO_EFFORT = ("none", "no_think", "minimal")
# Variables that keep the reasoning of earlier turns: their values for kept and left out.
HISTORY: dict[str, tuple[Any, Any]] = {
    "preserve_thinking": (True, False),  # LFM2.5, Laguna
    "preserved_thinking": (True, False),  # Hy3
    "keep_past_thinking": (True, False),  # LFM2.5
    "clear_thinking": (False, True),  # GLM 4.7
    "truncate_history_thinking": (False, True),  # Nemotron 3
    "drop_thinking": (False, True),  # DeepSeek V4
    "think_render_option": ("all", "lastthink"),  # Solar
}
FORMAT = "response_format"
PRESERVE = "preserve_reasoning"  # llama.cpp's name for any of these
_ALSO_OFF = {"thinking_mode": ("chat",)}  # DeepSeek V3.2


def reasoning_setting(variables: Mapping[str, Any]) -> str | None:
    """Return the reasoning mode that template variables request: "on", "off", or None if they set
    none.
    """
    said = [
        any(_same(variables[name], word) for word in (off, *_ALSO_OFF.get(name, ())))
        for name, (_, off) in SWITCHES.items()
        if variables.get(name) is not None
    ]
    if said:
        return OFF if said[0] else ON
    if (effort := variables.get(EFFORT)) is not None:
        return OFF if effort in _NO_EFFORT[:2] else ON
    return None


def _same(value: Any, word: Any) -> bool:
    """Whether ``value`` and ``word`` are equal and of one type, so that 0 does not equal False."""
    return type(value) is type(word) and bool(value == word)


def reasoning_default(template: ChatTemplate) -> str:
    """Return the reasoning mode of the template's own settings (``defaults``, else ``reasoning``):
    "on", "off" or "auto".
    """
    return reasoning_setting(template.defaults) or template.reasoning


def is_off(
    template: ChatTemplate,
    variables: Mapping[str, Any],
    reasoning: str | None = None,
    budget: int | None = None,
) -> bool:
    """Whether reasoning is disabled for an answer.

    The call's ``reasoning`` ("on" or "off") decides, else its template ``variables``. If neither is
    set, the template's default does, unless the call has a reasoning ``budget`` (tokens).
    """
    said = reasoning if reasoning in (ON, OFF) else reasoning_setting(variables)
    if said is not None:
        return said == OFF
    return budget is None and reasoning_default(template) == OFF


def with_reasoning(template: ChatTemplate, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given``, the call's template variables, plus the template's default variables and
    the variables that switch reasoning.

    If the call's variables set the reasoning mode, defaults of all variables for it are ignored.
    """
    own = template.defaults
    said = reasoning_setting(given)
    default = reasoning_default(template)
    if said is not None:
        own = {name: value for name, value in own.items() if name not in (*SWITCHES, EFFORT)}
    if said == ON and default != OFF and not any(name in given for name in SWITCHES):
        said = AUTO  # an effort alone: the template decides what it means
    made = switched(template, said or default)
    if EFFORT in made and given.get(EFFORT) in _NO_EFFORT:  # use the template's own word for it
        given = {name: value for name, value in given.items() if name != EFFORT}
    return {**preserving(template, {**own, **given}.get(PRESERVE)), **made, **own, **given}


def preserving(template: ChatTemplate, asked: Any = None) -> dict[str, Any]:
    """Return the variables of HISTORY that the template reads, set to keep or drop earlier
    reasoning.

    ``asked``: the call's choice (llama.cpp's ``preserve_reasoning``); if it is no bool,
    ``template.preserve`` decides. Empty if that is None, and for a template that cannot be parsed.
    """
    keep = asked if isinstance(asked, bool) else template.preserve
    if keep is None:
        return {}
    try:
        read = template.variables()
    except TreadleError:
        return {}
    return {name: pair[not keep] for name, pair in HISTORY.items() if name in read}


def switched(template: ChatTemplate, reasoning: str) -> dict[str, Any]:
    """Return the variables of SWITCHES, and ``reasoning_effort``, that set the template to the mode
    ``reasoning``: "on", "off" or "auto", the template's own choice.

    Empty for "auto", for a template without such a variable, and for one that cannot be parsed:
    rendering it reports the error.
    """
    if reasoning == AUTO:
        return {}
    try:
        read = template.variables()
    except TreadleError:
        return {}
    result = {name: pair[reasoning == OFF] for name, pair in SWITCHES.items() if name in read}
    words = [word for word in _NO_EFFORT if re.search(rf"""["']{word}["']""", template.source)]
    if EFFORT in read and words:
        result[EFFORT] = words[0] if reasoning == OFF else "high"
    return result


def check_reasoning(reasoning: Any, name: str = "reasoning") -> str:
    """Return ``reasoning`` if it is a word of REASONING; raise TreadleError otherwise."""
    if not isinstance(reasoning, str) or reasoning not in REASONING:
        raise TreadleError(f"{name}={reasoning!r:.40}: expected {', '.join(REASONING)}")
    return reasoning


def format_variables(
    template: ChatTemplate, kind: str | None, schema: Any = None, tool_choice: str | None = None
) -> dict[str, Any]:
    """Return the variables that tell a template the format of the answer and whether a tool must be
    called; only those that the template reads.

    ``kind``: "json_schema", with the ``schema``, "json_object", or None. ``tool_choice``: "auto",
    "required" or "none". The value of ``response_format`` is an object of type and schema if the
    template reads parts of it (Kimi K3, Cohere's), the schema if it writes it as JSON (DeepSeek
    V4), else the schema as JSON text (Solar).
    """
    source = template.source
    made: dict[str, Any] = {}
    if kind is not None and FORMAT in source:
        if re.search(rf"\b{FORMAT}\s*(\.|\[)", source):
            made[FORMAT] = {"type": kind} if schema is None else {"type": kind, "schema": schema}
        elif schema is not None:
            written = re.search(rf"\b{FORMAT}\s*\|\s*tojson", source)
            made[FORMAT] = schema if written else json.dumps(schema, ensure_ascii=False)
        if schema is not None:
            made["response_schema"] = schema
    if tool_choice is not None and "tool_choice" in source:
        made["tool_choice"] = tool_choice
    if not made:
        return {}
    try:
        read = template.variables()
    except TreadleError:
        return {}
    return {name: value for name, value in made.items() if name in read}


def unread(template: ChatTemplate, names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that the template does not read. Raises TemplateError for a
    template that cannot be parsed.
    """
    return sorted(set(names) - template.variables())


def check_own(template: Mapping[str, Any] | None, where: str = "template") -> dict[str, Any]:
    """Return a copy of ``template``, the argument of ``chat(template=...)``: variables by name.
    Raises TreadleError, which calls it ``where``, if it is invalid or sets ``messages`` or
    ``add_generation_prompt``.
    """
    if not isinstance(template, Mapping | None):
        raise TreadleError(f"{where} is {type(template).__name__}: expected variables by name")
    for name in template or ():
        if not isinstance(name, str):
            raise TreadleError(f"{where}: {name!r:.40}: expected the name of a variable")
        if name in OURS:
            raise TreadleError(f"{where}: {name!r:.40} is set by treadle and cannot be given")
    return dict(template or {})


def check_variables(template: ChatTemplate, names: Iterable[str], settings: Iterable[str]) -> None:
    """Raise TypeError if the template does not read one of ``names``, so that a typo is not silent.
    ``settings``: names of generation settings that the error may suggest, as it does those of
    ``chat`` and ``load``.

    Raises TemplateError for a template that cannot be parsed.
    """
    read = template.variables() - OURS
    for name in names:
        if name not in read:
            from treadle.base.foreign_keywords import CHAT_SETTINGS, LOAD_SETTINGS, hint

            known = [*CHAT_SETTINGS, *settings, *read]
            raise TypeError(
                f"chat() got an unexpected keyword argument {name!r}: neither a setting of "
                "generate() nor a variable of this model's chat template"
                f"{hint(name, known, LOAD_SETTINGS)}"
            )
