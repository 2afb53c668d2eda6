"""The prompt of a conversation: messages converted to the form that the chat template reads, and
rendered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.base.validate import listed
from treadle.chat.messages import ChatMessages, ends_with_open_answer
from treadle.chat.template.variables import check_own, check_variables
from treadle.chat.tools.detect import dialect_of
from treadle.chat.tools.history import needs_form
from treadle.chat.tools.messages import (
    in_another_form,
    messages_for_template,
    prompt_with_last_message,
)
from treadle.errors import TemplateError, TreadleError

if TYPE_CHECKING:
    from treadle.chat.media_parts import MediaPart
    from treadle.chat.template.template import ChatTemplate
    from treadle.media.marks import HiddenMarks, Layout, MediaMarks, Piece


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The pictures and sounds of one request, ``parts``, in order of appearance, while its prompt
    is rendered. ``marks``: the placeholder texts and special tokens of the model's media families.
    ``hidden``: hides texts of users that spell such marks.
    """

    parts: tuple[MediaPart, ...]
    marks: tuple[MediaMarks, ...]
    hidden: HiddenMarks

    @classmethod
    def of(cls, conversation: ChatMessages, marks: Sequence[MediaMarks]) -> PromptMedia | None:
        """Return the pictures and sounds of a conversation; None if it has none. ``marks``: those
        of the model's media families.
        """
        if not conversation.media:
            return None
        from treadle.media.marks import HiddenMarks  # imported late: rarely needed

        return cls(conversation.media, tuple(marks), HiddenMarks(marks))

    @property
    def placeholders(self) -> dict[str, tuple[str, ...]]:
        """The texts that stand for a picture and for a sound in a rendered prompt, by type of part:
        "image", "audio".
        """
        return {each.kind: each.placeholders for each in self.marks}


@dataclass(frozen=True, eq=False)
class ChatPrompt:
    """A rendered prompt. ``text``: the prompt, with a mark for each picture and sound. ``media``:
    the pictures and sounds, None if there are none.
    """

    text: str
    media: PromptMedia | None = None

    @property
    def shown(self) -> str:
        """The text with the marks that users wrote restored; for people, not for tokenization."""
        return self.text if self.media is None else self.media.hidden.show(self.text)

    def split(self, layouts: Sequence[Layout]) -> list[Piece]:
        """Return the text in pieces: each mark is replaced by the layout of its picture or sound
        (``layouts``, in order of appearance).

        Raises TemplateError if the marks do not match the media, as ``media.marks.split_prompt``
        does.
        """
        from treadle.media.marks import TextPiece, split_prompt

        if self.media is None:
            return [TextPiece(self.text)]
        kinds = [part.kind for part in self.media.parts]
        return split_prompt(self.text, self.media.marks, kinds, layouts, self.media.hidden)


def conversation_prompt(
    template: ChatTemplate,
    conversation: ChatMessages,
    tools: list[dict[str, Any]] | None,
    own: Mapping[str, Any] | None,
    variables: Mapping[str, Any],
    settings: Sequence[str],
    *,
    marks: Sequence[MediaMarks] = (),
) -> ChatPrompt:
    """Render a conversation; a last message of the assistant is continued.

    ``tools`` None: messages with tool calls, tool results, later system messages or reasoning are
    converted to the template's form, and so are messages on which the template raises. With
    ``tools``, a list in OpenAI's form, they are rendered unchanged. ``own``: variables that the
    template need not read; ``variables``: variables that it must read. ``settings``: names of
    generation settings, for hints on misspelt names. ``marks``: those of the model's media
    families.

    Raises TreadleError for invalid arguments, TypeError for a variable that the template does not
    read, TemplateError if the template refuses the messages.
    """
    if tools is not None and not all(isinstance(tool, Mapping) for tool in listed("tools", tools)):
        raise TreadleError(f"tools={tools!r:.80}: expected dicts as in OpenAI's API")
    if variables:
        check_variables(template, variables, settings)
    given = {**check_own(own), **variables}
    media = PromptMedia.of(conversation, marks)
    messages = conversation.messages
    try:
        if tools is None and needs_form(messages):
            messages, _ = messages_for_template(messages, [], dialect_of(template))
        return ChatPrompt(render_messages(template, messages, tools, given, media=media), media)
    except TemplateError as error:
        if tools is not None:
            raise
        messages = in_another_form(messages, template, error)
        return ChatPrompt(render_messages(template, messages, None, given, media=media), media)


def render_messages(
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    *,
    media: PromptMedia | None = None,
    continued: bool = True,
    within: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """Render messages that are already in the template's form, with their ``media``. ``continued``:
    if the last message is an open answer of the assistant, the prompt ends inside its content.
    ``within``: the prompt ends inside the last message's reasoning. Else, with
    ``add_generation_prompt``, it ends with the beginning of an answer.
    """
    given = {"tools": tools, **variables}
    placeholders = None
    if media is not None:
        messages = media.hidden.hide(messages)
        given = media.hidden.hide(given)
        placeholders = media.placeholders
    if within or (continued and ends_with_open_answer(messages)):
        *earlier, last = messages
        prompt = template.render_read(earlier, placeholders, add_generation_prompt=True, **given)
        return prompt_with_last_message(template, prompt, last, within=within)
    return template.render_read(
        messages, placeholders, add_generation_prompt=add_generation_prompt, **given
    )
