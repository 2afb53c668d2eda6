"""Tool-call and reasoning formats of model families, one row each."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.base.text_overlap import overlap


@dataclass(frozen=True)
class Thought:
    """Marks around reasoning: ``open`` and ``close``.

    ``reserved``: the marks are control tokens, which ordinary text never contains. ``stray``: marks
    that are dropped if they stand alone. ``ends``: other marks that end reasoning which was not
    closed. ``composed_of``: text in the source of templates that compose the marks of parts, so
    that the source has no whole mark.
    """

    open: str
    close: str
    between: str = ""  # mark between two reasoning messages
    reserved: bool = False
    stray: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    composed_of: str = ""

    @property
    def begin(self) -> str:
        """``open`` without the line break at its end, which models may omit."""
        return self.open.rstrip()

    @property
    def sign(self) -> str:
        """Text that shows that reasoning begins: ``open`` without a mark that other messages have
        too.
        """
        return self.open.removesuffix("<|message|>").rstrip()


THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("[THINK]", "[/THINK]", reserved=True, stray=("[/THINK]",)),  # Magistral, Ministral 3
    Thought(  # Gemma 4
        "<|channel>thought\n", "<channel|>", reserved=True, stray=("<channel|>", "<|channel>")
    ),
    Thought(  # Command R
        "<|START_THINKING|>", "<|END_THINKING|>", reserved=True, stray=("<|END_THINKING|>",)
    ),
    Thought("<seed:think>", "</seed:think>"),  # Seed-OSS
    Thought("<think:opensource>", "</think:opensource>", composed_of="</think"),  # Hy3
    Thought(  # Apertus
        "<|inner_prefix|>", "<|inner_suffix|>", reserved=True, stray=("<|inner_suffix|>",)
    ),
    Thought(  # Kimi K3, whose answers have marks around their text too
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        reserved=True,
        stray=(
            "<|close|>think<|sep|>",
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
        ends=("<|open|>response<|sep|>",),
        composed_of="<|close|>",
    ),
    Thought("Here are my reasoning steps:\n", "[BEGIN FINAL RESPONSE]"),  # Apriel
)


_RECIPIENT = re.compile(r"to=([^\s<]+)")  # in a header
MAX_SPACE = 8  # characters of white space within a mark of calls
_SPACE = " \t\r\n"
QUOTE = '<|"|>'  # around strings, in the style "own"


@dataclass(frozen=True)
class Channels:
    """Format of answers that consist of messages: ``start``, a header, text, ``end``.

    A header is the text up to ``message``; it names the channel, and perhaps a tool, matched by
    ``call``. In formats without ``message``, a header is one mark: of reasoning (``thought``), of
    text for the user (``final``), or of calls (``calls``).
    """

    start: str
    end: str
    thought: Thought  # the whole header of reasoning, and the end of its message
    final: str  # the whole header of text for the user
    known_by: tuple[str, ...]  # strings by which a template of this format is recognised
    message: str = ""
    call: re.Pattern[str] | None = None
    preamble: str = ""  # header of text for the user before a call
    heads: tuple[str, ...] = ()  # possible beginnings of a header
    calls: tuple[str, ...] = ()  # marks of call messages, where a header is one mark

    def is_for_user(self, header: str) -> bool:
        """Whether a message with this header is for the user: not reasoning, and not to or from a
        tool.
        """
        role = header.lstrip()
        own = not role.startswith("<|start|>") or role.startswith(self.start)
        recipients = _RECIPIENT.findall(header)
        channel = header.rpartition("<|channel|>")[2]
        tools = [to for to in recipients if to not in ("user", "assistant")]
        return own and not tools and "analysis" not in channel

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks of the format, besides those of calls."""
        own = (self.start, self.end, self.thought.open, self.final, *self.calls)
        return (*own, *self.known_by, "<|constrain|>") if self.message else own


@dataclass(frozen=True)
class Tags:
    """Format of an argument between tags: ``open KEY then VALUE close``.

    ``gap`` stands on both sides of the value, ``behind`` after each argument, ``end`` after the
    last. White space in ``then`` may be missing or longer. Before values that are not strings one
    of ``others`` stands in place of ``then``. ``quotes`` may surround strings.
    """

    open: str
    then: str
    close: str
    end: str
    gap: str = ""
    behind: str = "\n"
    quotes: tuple[str, str] = ("", "")
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolCallFormat:
    """Format of a call: ``open before NAME after ARGUMENTS behind``. Several calls are joined by
    ``between``, with ``wrap[0]`` before and ``wrap[1]`` after all of them.

    ``style``: notation of arguments: "object" (JSON, in one object with the name), "json", "tags"
    (see ``tags``), "python" (keyword arguments of a Python call) or "own" (Gemma 4's). Without
    ``open`` and ``wrap``, an answer that begins with a brace is a call.
    """

    name: str
    open: str = ""
    before: str = ""
    after: str = ""
    behind: str = ""
    between: str = ""
    wrap: tuple[str, str] = ("", "")
    style: str = "json"
    lead: str = ""  # optional mark before a call of a format without ``open``
    id_mark: str = ""  # mark before an id that stands between the name and ``after``
    id_first: bool = False  # an id stands between ``open`` and ``before``
    id_form: str = "[a-zA-Z0-9]{9}"  # regular expression of that id
    id_size: int = 0  # length of ids, which the template requires in ``id_form``
    id_behind: bool = False  # an id may follow the arguments in the call's object
    id_key: str = ""  # key of an id that may come first in the call's object
    named_ids: bool = False  # ids are functions.NAME:N, and the template writes no other name
    numbered: bool = False  # ``id_mark`` is followed by the call's number, not an id
    content: str = ""  # reserved name, not a tool's: content follows it
    also: tuple[str, ...] = ()  # other spellings of the trigger
    channels: Channels | None = None
    tags: Tags | None = None
    told_by: str = ""  # text in templates that describe this format but render no calls

    @property
    def trigger(self) -> str:
        """First mark of a call; "" where any answer may be a call."""
        return self.wrap[0] or self.open

    @property
    def triggers(self) -> tuple[str, ...]:
        """All spellings of the trigger; empty where any answer may be a call."""
        return (self.trigger, *self.also) if self.trigger else ()

    @property
    def starts(self) -> tuple[str, ...]:
        """Marks at which calls begin: all spellings of the trigger, and the keys of
        ``shortened``.
        """
        return tuple(dict.fromkeys((*self.triggers, *self.shortened)))

    @property
    def shortened(self) -> dict[str, str]:
        """Marks at which a call begins if the model left out the trigger, each with the text to
        insert for the grammar: the trigger after its core (see ``core_of``), and the mark.
        """
        result = {}
        if self.wrap[0] and self.open.lstrip().startswith("<"):
            result[self.open.lstrip()] = core_of(self.wrap[0])[1] + self.open
        before = self.before.strip()
        if self.open and not self.wrap[0] and self.tags and before.startswith("<"):
            result[before] = core_of(self.open)[1] + self.before
        return result

    @property
    def by_header(self) -> bool:
        """Whether a call is a message whose header names the tool."""
        return self.channels is not None and self.channels.call is not None

    @property
    def sign(self) -> str:
        """The trigger without the white space and bracket at its end; "" where any answer may be a
        call.
        """
        return core_of(self.trigger)[0]

    @property
    def first(self) -> str:
        """Text that begins each call inside ``wrap``; "" if a call begins with the tool's name."""
        return self.open or ("" if self.style == "python" else "{")

    @property
    def head_end(self) -> tuple[str, bool]:
        """The text that ends a tool's name, and whether it is part of the arguments."""
        if self.style == "tags" and not self.after.strip():
            return "<", True
        return (self.after.strip() or self.after, False) if self.after else ("{", True)

    @property
    def marks(self) -> tuple[str, ...]:
        """All fixed texts that the format writes around names and arguments: before, between and
        after calls, quotes and tags. Some may be empty.
        """
        own = (self.open, self.before, self.after, self.behind, self.between, *self.wrap)
        quote = (QUOTE,) if self.style == "own" else ()
        tags = self.tags
        between = (tags.open, *tags.then.split("\n"), tags.close, tags.end) if tags else ()
        others = tags.others if tags else ()
        return (*own, self.lead, self.id_mark, *quote, *between, *others)

    @property
    def close(self) -> str:
        """The mark after a call, without brackets that close the call's JSON object."""
        return self.behind.lstrip("}\n " if self.style == "object" else "").strip()

    def new_id(self) -> str:
        """Return a new random id for a call, of ``id_size`` hexadecimal digits or like
        ``call_...``.
        """
        own = secrets.token_hex(5)[: self.id_size]
        return own or f"call_{secrets.token_hex(12)}"

    def split_head(self, head: str) -> tuple[str, str]:
        """Split the text between ``open`` and ``after``; return the leading id or "", and the text
        from the tool's name on.
        """
        if self.id_first:
            id, _, said = head.partition(self.before)
            return id.strip(), said.strip()
        return "", head.strip().removeprefix(self.before.strip())

    def write(self, *calls: tuple[str, Mapping[str, Any]]) -> str:
        """Return calls (name, arguments) as text in this format, for a prompt. Formats with tags or
        Gemma 4's notation are not supported.
        """
        made = []
        for name, arguments in calls:
            said = json.dumps(arguments, ensure_ascii=False)
            if self.style == "python":
                said = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
            made.append(f"{self.open}{self.before}{name}{self.after}{said}{self.behind}")
        return f"{self.wrap[0]}{self.between.join(made)}{self.wrap[1]}"


def core_of(mark: str) -> tuple[str, str]:
    """Split a call's mark into its core and the bracket at its end, "[" or "". Models write any
    white space between the two.
    """
    core = mark.rstrip("[ \n")
    return core, "[" if mark.endswith("[") else ""


def find_mark(text: str, mark: str) -> tuple[int, str] | None:
    """Return the offset of a call's mark in a text, and the mark as it is written there; None if it
    is absent.
    """
    found = _spaced(mark).search(text)
    return None if found is None else (found.start(), found.group())


def begun_mark(text: str, mark: str) -> int:
    """Return the length of the longest suffix of a text that may be the beginning of a
    call's mark.
    """
    core, bracket = core_of(mark)
    behind = text.rpartition(core)[2]
    if (
        bracket
        and len(behind) < len(text)
        and len(behind) <= MAX_SPACE
        and not behind.strip(_SPACE)
    ):
        return len(core) + len(behind)
    return overlap(text, core)


def mark_pattern(mark: str) -> re.Pattern[bytes]:
    """Return the pattern that finds a call's mark in bytes, with any white space before its
    bracket.
    """
    return re.compile(_spaced(mark).pattern.encode())


@lru_cache(256)
def _spaced(mark: str) -> re.Pattern[str]:
    core, bracket = core_of(mark)
    space = f"[{_SPACE}]{{0,{MAX_SPACE}}}" if bracket else ""
    return re.compile(re.escape(core) + space + re.escape(bracket))


_NAME = '{"name": "'
_ARGUMENTS = '", "arguments": '
_CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"

HERMES = ToolCallFormat(  # Hermes, Qwen 2.5, Qwen 3
    "hermes",
    open="<tool_call>",
    before="\n" + _NAME,
    after=_ARGUMENTS,
    behind="}\n</tool_call>",
    between="\n",
    style="object",
    told_by="arguments within <tool_call></tool_call> XML tags",  # SmolLM3
)
BARE = ToolCallFormat(  # Llama 3.1 to 3.3
    "json",
    before=_NAME,
    after='", "parameters": ',
    behind="}",
    style="object",
    lead="<|python_tag|>",
)
HARMONY = ToolCallFormat(  # gpt-oss
    "harmony",
    open="<|channel|>commentary to=functions.",
    after=" <|constrain|>json<|message|>",
    channels=Channels(
        start="<|start|>assistant",
        end="<|end|>",
        final="<|channel|>final<|message|>",
        thought=Thought("<|channel|>analysis<|message|>", "<|end|>", between="<|start|>assistant"),
        known_by=("<|channel|>", "<|message|>"),
        message="<|message|>",
        call=re.compile(r"to=functions\.([^\s<]+)"),
        preamble="<|channel|>commentary<|message|>",
        heads=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "to="),
    ),
)
SOLAR = ToolCallFormat(  # Solar Open
    "solar",
    open="<|tool_call:begin|>",
    before="<|tool_call:name|>",
    after="<|tool_call:args|>",
    behind="<|tool_call:end|>",
    wrap=("<|tool_calls|>", "<|calls|>"),
    id_first=True,
    id_form="[a-z0-9]{10}",
    id_size=10,
    channels=Channels(
        start="<|begin|>assistant",
        end="<|end|>",
        final="<|content|>",
        thought=Thought("<|think|>", "<|end|>", between="<|begin|>assistant"),
        known_by=("<|begin|>assistant", "<|think|>", "<|content|>"),
        calls=("<|tool_calls|>", "<|tool_call:begin|>"),
    ),
)

_PARAMETER = Tags("<parameter=", ">", "</parameter>", "</function>", gap="\n")
_ARG = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>")
_HY = ":opensource>"  # ends every tag of Hy3


def _dsml(name: str, wrap: str) -> ToolCallFormat:
    """Return a DeepSeek format, whose tags contain a special mark and tell which values are
    strings. ``wrap``: name of the tag around all calls.
    """
    mark = "｜DSML｜"
    return ToolCallFormat(
        name,
        open=f'\n<{mark}invoke name="',
        after='">\n',
        style="tags",
        wrap=(f"<{mark}{wrap}>", f"\n</{mark}{wrap}>"),
        tags=Tags(
            f'<{mark}parameter name="',
            '" string="true">',
            f"</{mark}parameter>",
            f"</{mark}invoke>",
            others=('" string="false">',),
        ),
    )


# The first row that finds a template's own call is used: specific ones come first.
ROWS = (
    HARMONY,
    SOLAR,
    ToolCallFormat(  # Kimi K2 and Linear
        "kimi",
        open="<|tool_call_begin|>",
        before="functions.",
        id_mark=":",
        id_form="[0-9]{1,6}",
        after="<|tool_call_argument_begin|>",
        behind="<|tool_call_end|>",
        wrap=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        named_ids=True,
    ),
    ToolCallFormat(  # Kimi K3
        "elements",
        open='<|open|>call tool="',
        id_mark='" index="',
        id_form="[0-9]{1,6}",
        numbered=True,
        after='"<|sep|>',
        style="tags",
        wrap=("<|open|>tools<|sep|>", "<|close|>tools<|sep|><|close|>message<|sep|>"),
        tags=Tags(
            '<|open|>argument key="',
            '" type="string"<|sep|>',
            "<|close|>argument<|sep|>",
            "<|close|>call<|sep|>",
            behind="",
            others=tuple(
                f'" type="{kind}"<|sep|>'
                for kind in ("number", "boolean", "null", "object", "array")
            ),
        ),
    ),
    ToolCallFormat(  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        "tags",
        open="<tool_call>",
        before="\n<function=",
        after=">\n",
        behind="\n</tool_call>",
        between="\n",
        style="tags",
        tags=_PARAMETER,
    ),
    ToolCallFormat(  # Seed-OSS
        "seed",
        open="<seed:tool_call>",
        before="\n<function=",
        after=">\n",
        behind="\n</seed:tool_call>",
        between="\n",
        style="tags",
        tags=replace(_PARAMETER, gap=""),
    ),
    ToolCallFormat(  # MiniMax M2
        "invoke",
        open='\n<invoke name="',
        after='">\n',
        style="tags",
        wrap=("<minimax:tool_call>", "\n</minimax:tool_call>"),
        tags=Tags('<parameter name="', '">', "</parameter>", "</invoke>"),
    ),
    _dsml("dsml-functions", "function_calls"),  # DeepSeek V3.2
    _dsml("dsml-tools", "tool_calls"),  # DeepSeek V4
    ToolCallFormat(  # MiniCPM 5
        "param",
        open='<function name="',
        after='">',
        between="\n",
        style="tags",
        tags=Tags(
            '<param name="',
            '">',
            "</param>",
            "</function>",
            behind="",
            quotes=("<![CDATA[", "]]>"),
        ),
    ),
    ToolCallFormat(  # GLM 4.5 and 4.6, Ling 3, Laguna XS
        "arg",
        open="<tool_call>",
        after="\n",
        between="\n",
        style="tags",
        tags=_ARG,
    ),
    ToolCallFormat(  # GLM 4.7, Laguna S
        "arg-tight",
        open="<tool_call>",
        style="tags",
        tags=replace(_ARG, then="</arg_key><arg_value>", behind=""),
    ),
    ToolCallFormat(  # Hy3
        "arg-hy",
        open=f"\n<tool_call{_HY}",
        after=f"<tool_sep{_HY}\n",
        style="tags",
        wrap=(f"<tool_calls{_HY}", f"\n</tool_calls{_HY}"),
        tags=Tags(
            f"<arg_key{_HY}",
            f"</arg_key{_HY}\n<arg_value{_HY}",
            f"</arg_value{_HY}",
            f"</tool_call{_HY}",
        ),
    ),
    HERMES,
    ToolCallFormat(  # LFM2
        "python",
        after="(",
        between=", ",
        wrap=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        style="python",
        told_by="List of tools: ",
    ),
    ToolCallFormat(  # OLMo 3
        "python-lines",
        after="(",
        between="\n",
        wrap=("<function_calls>", "</function_calls>"),
        style="python",
    ),
    ToolCallFormat(  # Nemotron Nano 2
        "toolcall",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        between=", ",
        wrap=("<TOOLCALL>[", "]</TOOLCALL>"),
        style="object",
    ),
    ToolCallFormat(  # Apriel, Jamba
        "tool-calls",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        between=", ",
        wrap=("<tool_calls>[", "]</tool_calls>"),
        style="object",
        id_behind=True,
        id_form="[a-zA-Z0-9_-]{1,64}",
    ),
    ToolCallFormat(  # MiniMax M1
        "tool-lines",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        between="\n",
        wrap=("<tool_calls>\n", "\n</tool_calls>"),
        style="object",
    ),
    ToolCallFormat(  # Granite 3
        "granite",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        between=", ",
        wrap=("<|tool_call|>[", "]"),
        style="object",
        also=("<tool_call>[",),
        told_by="with <|tool_call|> followed by a JSON list",
    ),
    ToolCallFormat(  # Phi 4 mini
        "phi",
        open="<|tool_call|>",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}<|/tool_call|>",
        style="object",
        told_by="<|/tool|>",
    ),
    ToolCallFormat(  # Apertus
        "by-name",
        open='{"',
        after='": ',
        behind="}",
        between=", ",
        wrap=("<|tools_prefix|>[", "]<|tools_suffix|>"),
    ),
    ToolCallFormat(  # GigaChat 3.1
        "function-call",
        open="<|function_call|>",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        style="object",
    ),
    ToolCallFormat(  # GigaChat 3.0: a message of a role of its own
        "function-role",
        open="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}<|message_sep|>",
        style="object",
    ),
    ToolCallFormat(  # Mistral Small 3.2
        "mistral-id",
        open="[TOOL_CALLS]",
        after="[ARGS]",
        id_mark="[CALL_ID]",
        id_size=9,
    ),
    ToolCallFormat("mistral-args", open="[TOOL_CALLS]", after="[ARGS]", id_size=9),  # Ministral 3
    ToolCallFormat(  # Mistral Nemo
        "mistral-list",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        between=", ",
        wrap=("[TOOL_CALLS][", "]"),
        style="object",
        id_size=9,
        id_behind=True,
    ),
    ToolCallFormat(  # Firefunction 2
        "functools",
        before=_NAME,
        after=_ARGUMENTS,
        behind="}",
        between=", ",
        wrap=(" functools[", "]"),
        style="object",
    ),
    # Functionary 3.1
    ToolCallFormat("function", open="<function=", after=">", behind="</function>"),
    # Functionary 3.2
    ToolCallFormat("recipient", open=">>>", after="\n", content="all"),
    ToolCallFormat(
        "deepseek-r1",
        open=_CALL,
        before=f"function{_SEP}",
        after="\n```json\n",
        behind=f"\n```{_END}",
        between="\n",
        wrap=_CALLS,
    ),
    ToolCallFormat("deepseek", open=_CALL, after=_SEP, behind=_END, wrap=_CALLS),  # V3.1
    ToolCallFormat(  # Gemma 4
        "gemma",
        open="<|tool_call>",
        before="call:",
        behind="<tool_call|>",
        style="own",
    ),
    ToolCallFormat(  # Command R7B
        "action",
        before='\n    {"tool_name": "',
        after='", "parameters": ',
        behind="}",
        between=",",
        wrap=("<|START_ACTION|>[", "\n]<|END_ACTION|>"),
        style="object",
        id_key="tool_call_id",
    ),
    ToolCallFormat(  # Command R+, which calls "directly-answer" to answer in words
        "actions",
        before='\n    {\n        "tool_name": "',
        after='",\n        "parameters": ',
        behind="\n    }",
        between=",",
        wrap=("Action:\n```json\n[", "\n]```"),
        style="object",
        content="directly-answer",
        also=("Action: ```json\n[", "Action:```json\n["),
    ),
    BARE,
)
GENERIC = HERMES  # for templates without calls: the prompt tells how to write one
