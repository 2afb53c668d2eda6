"""Messages of a conversation, checked once per request.

``read_conversation`` is the only reader: messages from the library and from every protocol of the
server become a ``ChatMessages``. The code behind it, up to the chat template, checks nothing again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.chat.media_placeholders import described, is_text_part, name_of, placeholder
from treadle.errors import TemplateError, TreadleError, UnsupportedError
from treadle.media.kinds import NOUNS, PART_KINDS, kind_of_part, plurals

if TYPE_CHECKING:
    from treadle.chat.media_parts import MediaPart

Message = Mapping[str, Any]
Messages = Sequence[Message]

REASONING = ("reasoning_content", "thinking", "reasoning", "tool_plan")  # tool_plan: Command R7B
SYSTEM = ("system", "developer")
SPEAKERS = (*SYSTEM, "user", "assistant")
MEDIA = tuple(NOUNS)  # types of the parts that stand for a picture or a sound


@dataclass(frozen=True)
class MediaPolicy:
    """Rules for the pictures and sounds of messages.

    ``kinds``: the kinds that the model reads ("image", "audio"). A part of another kind is replaced
    by a sentence for the model, with a warning; with ``strict`` it raises UnsupportedError.
    ``local``: the caller is a program in this process, which may give paths and objects.
    """

    kinds: frozenset[str] = frozenset()
    strict: bool = False
    local: bool = True


TEXT_ONLY = MediaPolicy()


@dataclass(frozen=True, eq=False)
class ChatMessages:
    """The messages of one request, checked.

    ``messages``: dicts of JSON types. A content is a string, None, or a list of parts of the types
    text, thinking, image and audio; that of a tool result may be any JSON. Reasoning is copied to
    every key of REASONING. ``media``: the pictures and sounds of the image and audio parts, in
    order of appearance. ``warnings``: sentences about parts that were left out and tool results
    without a call.
    """

    messages: list[dict[str, Any]]
    media: tuple[MediaPart, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class PlacedPart:
    """A part other than text, as a client of the server sent it, with its place for errors, such as
    ``messages[2].content[1]``.
    """

    part: Message
    place: str


def read_conversation(
    messages: Any, policy: MediaPolicy = TEXT_ONLY, *, joins_text: bool = False
) -> ChatMessages:
    """Check ``messages``, in the form of OpenAI's chat API, and return them with their media and
    warnings. Parts may be ``PlacedPart``. ``joins_text``: a content of text parts alone becomes one
    string.

    Raises TemplateError for invalid messages, UnsupportedError for parts that the policy refuses,
    FileError for a picture or sound with invalid base64.
    """
    check_messages(messages)
    reader = _MediaReader(policy)
    made = read_messages([reader.read(i, message) for i, message in enumerate(messages)])
    check_calls(made)
    if joins_text:
        made = [_joined_text(message) for message in made]
    return ChatMessages(made, tuple(reader.media), (*reader.warnings, *lone_results(made)))


def may_have_media(messages: Any) -> bool:
    """Return whether any message has a picture, a sound or a ``PlacedPart``, so that the model's
    modalities must be known. Invalid messages count as having none.
    """
    if not isinstance(messages, list | tuple):
        return False
    contents = (each.get("content") for each in messages if isinstance(each, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
    return any(
        isinstance(part, PlacedPart)
        or (isinstance(part, Mapping) and kind_of_part(part.get("type")) is not None)
        for part in parts
    )


class _MediaReader:
    """Collects the pictures and sounds of messages in ``media``, in order of appearance;
    ``warnings`` has a sentence about each that was left out.
    """

    def __init__(self, policy: MediaPolicy) -> None:
        self.media: list[MediaPart] = []
        self.warnings: list[str] = []
        self._policy = policy

    def read(self, index: int, message: Message) -> Message:
        """Return message number ``index`` with each picture, sound or file replaced: by an image or
        audio part without data if it was added to ``media``, else by a text part.
        """
        content = message.get("content")
        of_tool = message.get("role") == "tool"
        if not isinstance(content, list | tuple) or not (of_tool or self._may_hold(content)):
            return message
        if of_tool and not all(map(_is_typed, content)):
            return message  # arbitrary JSON
        parts = []
        for at, part in enumerate(content):
            placed = _placed(part, f"messages[{index}].content[{at}]")
            if placed is None or is_text_part(placed.part):
                parts.append(part)
            elif of_tool or kind_of_part(placed.part.get("type")) is not None:
                parts.append(self._taken(placed, index, message))
            else:
                parts.append(placed.part)  # refused where parts are checked
        return {**message, "content": parts}

    @staticmethod
    def _may_hold(content: Sequence[Any]) -> bool:
        """Whether the content of a message by the user, the assistant or the system has a picture,
        a sound or a ``PlacedPart``.
        """
        return any(
            isinstance(part, PlacedPart)
            or (isinstance(part, Mapping) and kind_of_part(part.get("type")) is not None)
            for part in content
        )

    def _taken(self, placed: PlacedPart, index: int, message: Message) -> dict[str, Any]:
        """Return the part that replaces ``placed``, a part of ``message`` (number ``index``): its
        ``template_part``, or a text placeholder if the model cannot read it. Raises
        UnsupportedError instead of the latter with ``policy.strict``.
        """
        policy = self._policy
        of_tool = message.get("role") == "tool"
        if policy.kinds and kind_of_part(placed.part.get("type")) is not None:
            from treadle.chat.media_parts import read_media_part  # imported late: rarely needed

            try:
                found = read_media_part(placed.part, placed.place, local=policy.local)
            except TreadleError:
                if not of_tool or policy.strict:
                    raise
                found = None  # a tool's result may hold anything under these types
            if found is not None and found.kind in policy.kinds:
                self.media.append(found)
                return found.template_part
        words = described(placed.part)
        if policy.strict:
            raise UnsupportedError(
                f"{placed.place}: a {words} cannot be read: the model reads "
                f"{_readable(policy.kinds)}"
            )
        where = f"tool result {name_of(message)!r:.80}" if of_tool else f"message {index}"
        self.warnings.append(
            f"{where}: a {words} was dropped, because the model reads "
            f"{_readable(policy.kinds, only=True)}"
        )
        return placeholder(words, of_tool=of_tool, readable=_readable(policy.kinds))


def _readable(kinds: frozenset[str], *, only: bool = False) -> str:
    """Return the kinds of content that a model reads, in words: "text and pictures"; with ``only``,
    "only text and pictures".
    """
    if not kinds:
        return "only text" if only else "text alone"
    return " and ".join(("only text" if only else "text", *plurals(kinds)))


def _is_typed(part: Any) -> bool:
    return isinstance(part, PlacedPart) or (
        isinstance(part, Mapping) and isinstance(part.get("type"), str)
    )


def _placed(part: Any, place: str) -> PlacedPart | None:
    if isinstance(part, PlacedPart):
        return part
    return PlacedPart(part, place) if isinstance(part, Mapping) else None


def _joined_text(message: dict[str, Any]) -> dict[str, Any]:
    content: Any = message.get("content")
    if is_parts(content) and all(part["type"] == "text" for part in content):
        return {**message, "content": joined(content)}
    return message


# -- checks ---------------------------------------------------------------------------------------


def check_messages(messages: Any) -> None:
    """Raise TemplateError unless ``messages`` is a non-empty list of dicts, each with a role and
    with content or tool calls.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        found = type(messages).__name__
        raise TemplateError(f"messages is {found}: expected a list of dicts with role and content")
    if not messages:
        raise TemplateError("messages is empty: expected at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            found = type(message).__name__
            raise TemplateError(f"message {i} is {found}: expected a dict with role and content")
        if not isinstance(message.get("role"), str):
            raise TemplateError(f"message {i} has no role, such as 'user'")
        if "content" not in message and "tool_calls" not in message:
            raise TemplateError(f"message {i} has no content")


def read_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return checked copies of messages in JSON types, with the reasoning copied to every key of
    REASONING.

    Parts of type image and audio must have no data: it is in ``ChatMessages.media``. Raises
    TemplateError for invalid messages, UnsupportedError for parts of any other type but text and,
    of the assistant, thinking.
    """
    return [_read(i, message) for i, message in enumerate(plain(messages))]


def _read(i: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise TemplateError(f"message {i} is {message!r:.80}: expected a dict with a role")
    content = message.get("content")
    if message["role"] in SPEAKERS and not isinstance(content, str | list | None):
        kind = type(content).__name__
        raise TemplateError(f"message {i}: content is {kind}: expected a string or a list of parts")
    if isinstance(content, list) and (is_parts(content) or message["role"] in SPEAKERS):
        for part in content:
            _check_part(f"message {i}", part, thinks=message["role"] == "assistant")
    found = [message[name] for name in REASONING if message.get(name) is not None]
    if not found:
        return message
    return {**message, **dict.fromkeys(REASONING, found[0])}


def _check_part(where: str, part: Any, *, thinks: bool) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind is None:
        raise TemplateError(f"{where}: part {part!r:.80}: expected a dict with a type")
    if thinks and kind == "thinking" and isinstance(part.get("thinking"), str):
        return
    if kind in MEDIA and not part.keys() & PART_KINDS.keys():
        return
    if kind != "text":
        raise UnsupportedError(f"{where}: parts of type {kind!r:.40} are not supported, only text")
    if not isinstance(part.get("text"), str):
        raise TemplateError(f"{where} has a text part without a text string")


def check_calls(messages: Messages) -> None:
    """Raise TemplateError for messages with ``tool_calls`` that are not in the form of OpenAI's
    API.
    """
    for i, message in enumerate(messages):
        if not isinstance(calls := message.get("tool_calls") or [], list):
            found = type(calls).__name__
            raise TemplateError(f"message {i}: tool_calls is {found}: expected a list of calls")
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise TemplateError(
                    f"message {i}: call {call!r:.80}: expected a dict with a function and its name"
                )
            if not isinstance(arguments := function.get("arguments"), str | Mapping | None):
                found = type(arguments).__name__
                raise TemplateError(
                    f"message {i}: arguments is {found}: expected a JSON string or a dict"
                )


def plain(value: Any) -> Any:
    """Return a copy of ``value`` in JSON types only, so that templates are given no other Python
    objects.

    Raises TemplateError for other types, and for values nested too deeply.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise TemplateError("messages, tools or variables are too deeply nested") from None


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TemplateError(
        f"messages, tools and variables must be JSON types; found {type(value).__name__}"
    )


# -- facts about messages -------------------------------------------------------------------------


def ends_with_open_answer(messages: Messages) -> bool:
    """Whether the last message is an assistant message to be continued: one without tool calls that
    is not the only message.
    """
    last = messages[-1]
    return len(messages) > 1 and last["role"] == "assistant" and not last.get("tool_calls")


def ends_with_reasoning(messages: Messages) -> bool:
    """Whether the last message is an assistant message to be continued that has reasoning but no
    content.
    """
    last = messages[-1] if messages else {}
    found = last.get("reasoning_content") and not last.get("content")
    return bool(found) and ends_with_open_answer(messages)


def lone_results(messages: Messages) -> list[str]:
    """Return a warning for each tool result that follows no tool call."""
    return [
        f"tool result {name_of(message)!r:.80} follows no tool call: it is sent to the model as a "
        "user message"
        for message, called in with_calls(messages)
        if message.get("role") == "tool" and not called
    ]


def with_calls(messages: Messages) -> list[tuple[Message, bool]]:
    """Return each message with whether it belongs to a preceding tool call: only tool results and
    system messages stand between them.
    """
    made = []
    called = False
    for message in messages:
        role = message.get("role")
        called = called and (role == "tool" or role in SYSTEM)
        made.append((message, called))
        called = called or (role == "assistant" and bool(message.get("tool_calls")))
    return made


# -- contents -------------------------------------------------------------------------------------


def is_parts(content: Any) -> bool:
    """Whether a content is a list of parts, dicts with a type; a tool result may be a list of
    anything.
    """
    return isinstance(content, list) and all(isinstance(p, dict) and "type" in p for p in content)


def is_text(content: Any) -> bool:
    """Whether a content is a string, None, or a list of text parts."""
    if isinstance(content, list):
        return all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in content)
    return content is None or isinstance(content, str)


def can_join(content: Any) -> bool:
    """Whether a content is a string, None, or a list of text, image and audio parts."""
    return is_text(content) or (
        is_parts(content) and all(is_media(p) or isinstance(p.get("text"), str) for p in content)
    )


def is_media(part: Any) -> bool:
    """Whether a part is of type image or audio."""
    return isinstance(part, Mapping) and part.get("type") in MEDIA


def has_media(content: Any) -> bool:
    """Whether a content is a list with an image or audio part."""
    return isinstance(content, list) and any(map(is_media, content))


def joined(content: Any) -> str:
    """Return the text of a content: its text parts joined by newlines, without reasoning, pictures
    and sounds; "" for None.
    """
    if isinstance(content, list):
        apart = ("thinking", *MEDIA)
        return "\n".join(part["text"] for part in content if part.get("type") not in apart)
    return content or ""


def join_contents(contents: Iterable[Any], between: str) -> str | list[dict[str, Any]]:
    """Join the contents that are not empty, with the text ``between`` them. Return a string, or a
    list of parts if one of them has a picture or sound.
    """
    kept = [content for content in contents if content]
    if not any(map(has_media, kept)):
        return between.join(filter(None, map(joined, kept)))
    made: list[dict[str, Any]] = []
    for content in kept:
        parts = parts_of(content)
        if made:
            made.append(text_part(between))
        made += parts
    return _merged(made)


def wrap_content(before: str, content: Any, after: str) -> str | list[dict[str, Any]]:
    """Return a content with the texts ``before`` and ``after`` around it: a string, or a list of
    parts if it has a picture or sound.
    """
    if not has_media(content):
        return f"{before}{joined(content)}{after}"
    return _merged([text_part(before), *parts_of(content), text_part(after)])


def parts_of(content: Any) -> list[dict[str, Any]]:
    """Return a content as a list of parts: itself, one text part for a string, [] for
    "" and None.
    """
    if isinstance(content, list):
        return content
    return [text_part(content)] if content else []


def text_part(text: str) -> dict[str, Any]:
    """Return ``{"type": "text", "text": text}``."""
    return {"type": "text", "text": text}


def _merged(parts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parts with adjacent text parts joined and empty ones left out: some templates write
    line breaks between parts.
    """
    made: list[dict[str, Any]] = []
    for part in parts:
        if made and part["type"] == made[-1]["type"] == "text":
            made[-1] = text_part(made[-1]["text"] + part["text"])
        elif part.get("text") != "":
            made.append(part)
    return made
