"""Writes the reasoning before an answer in a chat template's style."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from treadle.chat.tools.formats import Thought
from treadle.errors import TemplateError, UnsupportedError

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate


class ReasoningStyle(NamedTuple):
    """White space and marks around reasoning, in this order: ``lead``, the opening mark, ``begin``,
    the reasoning, ``end``, the closing mark, ``behind``, the content.
    """

    lead: str = ""
    begin: str = ""
    end: str = ""
    behind: str = ""

    def write(self, thought: Thought, asked: str, reasoning: str, *, within: bool = False) -> str:
        """Return the prompt ``asked`` with ``reasoning`` between the marks of ``thought`` added.
        The prompt may end with the opening mark, or with an empty reasoning, which is replaced.
        ``within``: leave the reasoning open.
        """
        opened = f"{thought.begin}{self.begin}"
        ends = asked.rstrip()
        if ends.endswith(thought.close) and reasoning:
            before = ends.removesuffix(thought.close)
            empty = before.rstrip().endswith(thought.begin)
            asked = before.rstrip().removesuffix(thought.begin) if empty else before
        elif ends.endswith(thought.begin):
            asked = f"{ends}{asked[len(ends) :] or self.begin}"
            opened = ""
        elif not reasoning:
            return asked
        lead = self.lead if opened and not asked.endswith(self.lead) else ""
        end = "" if within else f"{self.end}{thought.close}{self.behind}"
        return f"{asked}{lead}{opened}{reasoning}{end}"


_LOOSE = ReasoningStyle("", "\n", "\n", "\n\n")  # DeepSeek R1, QwQ and models derived from them
_STYLES: WeakKeyDictionary[ChatTemplate, ReasoningStyle] = WeakKeyDictionary()
_USER = "hi"
_THOUGHT = "treadle thinks"
_WORDS = "treadle says"


def style_of(template: ChatTemplate, thought: Thought) -> ReasoningStyle:
    """Return the style in which the template renders the reasoning of a last assistant message. If
    the template leaves that out, the style is derived from the marks in its source.
    """
    if template not in _STYLES:
        _STYLES[template] = _found(template, thought)
    return _STYLES[template]


def _found(template: ChatTemplate, thought: Thought) -> ReasoningStyle:
    talk = [{"role": "user", "content": _USER}]
    names = ("reasoning_content", "reasoning", "thinking")
    said = {"role": "assistant", "content": _WORDS}
    with_it = _rendered(template, [*talk, {**said, **dict.fromkeys(names, _THOUGHT)}])
    open = re.escape(thought.begin)
    close = re.escape(thought.close)
    around = rf"(?:(\s*){open}(\s*))?{_THOUGHT}(\s*){close}(.*?){_WORDS}"
    begin = thought.open.removeprefix(thought.begin)
    if written := re.search(around, with_it, re.DOTALL):
        if written[2] is None:  # the opening mark is left out
            return ReasoningStyle("", begin, *written.group(3, 4))
        asked = _rendered(template, talk, asks=True)
        before = with_it[: written.start(2)].removesuffix(thought.begin)
        lead = "" if asked.startswith(before) else written[1]
        return ReasoningStyle(lead, *written.group(2, 3, 4))
    if thought.begin == "<think>" and f"{thought.begin}{thought.close}" not in template.source:
        return _LOOSE
    answer = re.search(rf"(<\|START_\w+\|>){_WORDS}", with_it)  # Command R's content has a mark
    return ReasoningStyle("", begin, "", answer[1] if answer else "")


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], *, asks: bool = False) -> str:
    try:
        return template.render(messages, add_generation_prompt=asks)
    except (TemplateError, UnsupportedError):
        return ""
