"""Prompt of a conversation: checks the arguments, then renders the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.validate import listed
from treadle.chat.template.messages import GoOn, check_messages, render_prompt
from treadle.chat.template.variables import check_own, check_variables
from treadle.errors import TreadleError

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate


def chat_prompt(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    own: Mapping[str, Any] | None,
    variables: Mapping[str, Any],
    settings: Sequence[str],
    *,
    go_on: GoOn | None = None,
) -> str:
    """Render ``messages`` with ``template``; a last message of the assistant is continued.

    ``own``: variables that the template need not read. ``settings``: names of generation settings,
    for hints on misspelt names. ``go_on``: see ``render_prompt``.
    """
    check_messages(messages)
    if tools is not None and not all(isinstance(tool, Mapping) for tool in listed("tools", tools)):
        raise TreadleError(f"tools={tools!r:.80}: expected dicts as in OpenAI's API")
    if variables:
        check_variables(template, variables, settings)
    given = {"tools": tools, **check_own(own), **variables}
    return render_prompt(template.render, messages, go_on, **given)
