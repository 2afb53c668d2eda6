"""How families of models write calls of tools, and how they reason: a row each."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from treadle.record import dataclass


@dataclass(frozen=True)
class Thought:
    """The marks around reasoning."""

    open: str
    close: str
    between: str = ""  # what begins another message, which may be reasoning too

    @property
    def sign(self) -> str:
        """What no text has but reasoning that begins: ``open``, or its part that tells it from
        other messages.
        """
        return self.open.removesuffix(Channels.message).rstrip()


THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("[THINK]", "[/THINK]"),  # Magistral, Ministral 3
    Thought("<|channel>thought\n", "<channel|>"),  # Gemma 4
    Thought("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R
)


QUOTE = '<|"|>'  # around texts, in the style "own"


class Channels:
    """gpt-oss: an answer is messages, each with a header that names its channel."""

    start, message, end = "<|start|>assistant", "<|message|>", "<|end|>"
    thought = Thought("<|channel|>analysis<|message|>", "<|end|>", between=start)
    final = "<|channel|>final<|message|>"
    marks = (start, message, end, "<|channel|>", "<|constrain|>")
    call = re.compile(r"to=functions\.([^\s<]+)")


@dataclass(frozen=True)
class Row:
    """How a family writes a call: ``open before NAME after ARGUMENTS behind``; several are joined
    by ``between``, with ``wrap`` before and behind all of them.

    ``style`` is how arguments are written: "object" (JSON, in one object with the name), "json",
    "tags" or "own". Without ``open``, an answer that begins with a brace is a call.
    """

    name: str
    open: str = ""
    before: str = ""
    after: str = ""
    behind: str = ""
    between: str = ""
    wrap: tuple[str, str] = ("", "")
    style: str = "json"
    lead: str = ""  # may stand before a call that has no mark of its own
    id_mark: str = ""  # an id stands between the name and ``after``, behind this
    short_ids: bool = False  # its template wants ids of nine letters and digits
    content: str = ""  # the name of no tool: what follows is content
    also: tuple[str, ...] = ()  # other spellings of the trigger
    channels: bool = False

    @property
    def trigger(self) -> str:
        """What comes first of a call; nothing where any answer may be one."""
        return self.wrap[0] or self.open

    @property
    def triggers(self) -> tuple[str, ...]:
        """The trigger, in each of its spellings; none where any answer may be a call."""
        return (self.trigger, *self.also) if self.trigger else ()

    @property
    def sign(self) -> str:
        """The trigger up to where it might be a text's too."""
        return self.trigger.rstrip("[")

    @property
    def marks(self) -> tuple[str, ...]:
        """All that it writes beside names and arguments."""
        own = (self.open, self.before, self.after, self.behind, self.between, *self.wrap)
        quote = (QUOTE,) if self.style == "own" else ()
        return (*own, self.lead, self.id_mark, *quote)

    @property
    def close(self) -> str:
        """The mark behind a call, without what belongs to its JSON."""
        return self.behind.lstrip("}\n " if self.style == "object" else "").strip()

    def new_id(self) -> str:
        """An id for a call."""
        return secrets.token_hex(5)[:9] if self.short_ids else f"call_{secrets.token_hex(12)}"

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as a model of the family writes it, for a prompt. For styles of JSON."""
        said = json.dumps(arguments, ensure_ascii=False)
        call = f"{self.open}{self.before}{name}{self.after}{said}{self.behind}"
        return f"{self.wrap[0]}{call}{self.wrap[1]}"


_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

HERMES = Row(  # Hermes, Qwen 2.5, Qwen 3
    "hermes",
    open="<tool_call>", before="\n" + _NAME, after=_ARGUMENTS, behind="}\n</tool_call>",
    between="\n", style="object",
)  # fmt: skip
BARE = Row(  # Llama 3.1 to 3.3
    "json",
    before=_NAME, after='", "parameters": ', behind="}", style="object", lead="<|python_tag|>",
)  # fmt: skip
HARMONY = Row(  # gpt-oss
    "harmony",
    open="<|channel|>commentary to=functions.", after=" <|constrain|>json<|message|>",
    channels=True,
)  # fmt: skip

# The first that finds a template's own call is the template's: special ones come first.
ROWS = (
    HARMONY,
    Row(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        "tags",
        open="<tool_call>", before="\n<function=", after=">\n", behind="\n</tool_call>",
        between="\n", style="tags",
    ),
    HERMES,
    Row(  # Mistral Small 3.2
        "mistral-id",
        open="[TOOL_CALLS]", after="[ARGS]", id_mark="[CALL_ID]", short_ids=True,
    ),
    Row("mistral-args", open="[TOOL_CALLS]", after="[ARGS]", short_ids=True),  # Ministral 3
    Row(  # Mistral Nemo
        "mistral-list",
        before=_NAME, after=_ARGUMENTS, behind="}", between=", ",
        wrap=("[TOOL_CALLS][", "]"), style="object", short_ids=True,
    ),
    Row(  # Firefunction 2
        "functools",
        before=_NAME, after=_ARGUMENTS, behind="}", between=", ",
        wrap=(" functools[", "]"), style="object",
    ),
    Row("function", open="<function=", after=">", behind="</function>"),  # Functionary 3.1
    Row("recipient", open=">>>", after="\n", content="all"),  # Functionary 3.2
    Row(
        "deepseek-r1",
        open=_CALL, before=f"function{_SEP}", after="\n```json\n", behind=f"\n```{_END}",
        between="\n", wrap=_CALLS,
    ),
    Row("deepseek", open=_CALL, after=_SEP, behind=_END, wrap=_CALLS),  # V3.1
    Row(  # Gemma 4
        "gemma",
        open="<|tool_call>", before="call:", behind="<tool_call|>", style="own",
    ),
    Row(  # Command R7B
        "action",
        before='\n    {"tool_name": "', after='", "parameters": ', behind="}", between=",",
        wrap=("<|START_ACTION|>[", "\n]<|END_ACTION|>"), style="object",
    ),
    Row(  # Command R+, which calls a tool that is none to answer in words
        "actions",
        before='\n    {\n        "tool_name": "', after='",\n        "parameters": ',
        behind="\n    }", between=",", wrap=("Action:\n```json\n[", "\n]```"), style="object",
        content="directly-answer", also=("Action: ```json\n[", "Action:```json\n["),
    ),
    BARE,
)  # fmt: skip
GENERIC = HERMES  # for templates that have no calls: the prompt says how to write one
