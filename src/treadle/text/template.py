"""Chat templates: from messages to the text that a model was trained to answer."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from treadle.errors import TemplateError
from treadle.text.builtin_templates import BUILT_INS, BuiltIn
from treadle.text.vocab import TokenType, Vocab

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

MAX_SOURCE = 1 << 20  # characters of a template; the longest known ones have 30,000
_REASONING = ("reasoning_content", "thinking", "reasoning")
_FILE_NAME = "<template>"  # jinja2's own for templates from strings

Message = Mapping[str, Any]


class ChatTemplate:
    """A jinja2 template, rendered as transformers' ``apply_chat_template`` does it.

    ``bos`` and ``eos`` are the texts the template knows as ``bos_token`` and ``eos_token``;
    ``tool_source`` is the template to use when tools are given, if that is another one.
    ``builtin`` names the built-in template that this is, or is None for a file's own; ``stop``
    are texts that end an answer where no token of the template does.
    The source is compiled when it is first used, for jinja2 takes time to import.
    """

    def __init__(
        self,
        source: str,
        *,
        bos: str = "",
        eos: str = "",
        tool_source: str | None = None,
        builtin: str | None = None,
        stop: Sequence[str] = (),
    ) -> None:
        self.source = source
        self.bos, self.eos = bos, eos
        self.tool_source = tool_source
        self.builtin = builtin
        self.stop = tuple(stop)
        self._compiled: dict[str, Any] = {}

    def __repr__(self) -> str:
        kind = f"built-in {self.builtin}" if self.builtin else "from the file"
        return f"ChatTemplate({kind}, {len(self.source)} characters)"

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **vars: Any,
    ) -> str:
        """The prompt for ``messages``, each with ``role`` and ``content``.

        The text spells control tokens: encode it with ``special=True``. ``vars`` are more
        variables for the template (``enable_thinking=False``). Raises TemplateError, with the
        line, when the template is broken, refuses the messages, or does not come to an end.
        """
        source = self.tool_source if tools and self.tool_source is not None else self.source
        variables = {
            "bos_token": self.bos,
            "eos_token": self.eos,
            "documents": None,
            **_plain(vars),
            "messages": [_with_reasoning(message) for message in _plain(messages)],
            "tools": _plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._run(source, variables)
        except TemplateError as e:
            if tools is not None or "NoneType" not in str(e):
                raise
            # Templates made for tools loop over them without a look whether there are any.
            try:
                return self._run(source, {k: v for k, v in variables.items() if k != "tools"})
            except TemplateError:
                pass
            raise

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        from jinja2.exceptions import TemplateError as JinjaError

        from treadle.text import sandbox

        try:
            if source not in self._compiled:
                self._compiled[source] = self._compile(source)
            return sandbox.render(self._compiled[source], variables)
        except (JinjaError, ArithmeticError, LookupError, TypeError, ValueError) as e:
            raise TemplateError(f"chat template{_line(e)}: {e}") from None
        except (AttributeError, RecursionError, MemoryError) as e:
            raise TemplateError(f"chat template{_line(e)}: {type(e).__name__}: {e}") from None

    def _compile(self, source: str) -> Any:
        from treadle.text.sandbox import ChatEnvironment

        if len(source) > MAX_SOURCE:
            raise ValueError(f"{len(source)} characters (at most {MAX_SOURCE})")
        return ChatEnvironment(datetime.now).from_string(source)


def _line(error: BaseException) -> str:
    """The line of the template, which jinja2 keeps in syntax errors and rewritten tracebacks."""
    line = getattr(error, "lineno", None)
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == _FILE_NAME:
            line = frame.lineno
    return f", line {line}" if line else ""


def _plain(value: Any) -> Any:
    """A copy in JSON's types alone: what else an object can do is no template's business."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    raise TemplateError(
        f"messages, tools and variables are of JSON's types; this is a {type(value).__name__}"
    )


def _with_reasoning(message: Any) -> dict[str, Any]:
    """The message with its reasoning under each name that templates read."""
    if not isinstance(message, dict) or "role" not in message:
        raise TemplateError(f"a message is a dict with a role, not {message!r:.80}")
    found = [message[name] for name in _REASONING if message.get(name) is not None]
    if not found:
        return message
    return {"thinking": found[0], **message, "reasoning_content": found[0]}


def load_template(gguf: GGUF, arch: str = "") -> ChatTemplate:
    """The chat template of a model file, or the built-in one that fits its tokens and ``arch``.

    ``.builtin`` of the result says which. Files may carry further templates by name; the one
    named ``tool_use`` is taken when tools are given. Raises FileError and UnsupportedError as
    ``load_tokenizer`` does.
    """
    vocab = Vocab(gguf)
    bos, eos = (
        vocab.raw(vocab.specials[name]).decode("utf-8", "replace") if name in vocab.specials else ""
        for name in ("bos", "eos")
    )
    own = gguf.metadata.get("tokenizer.chat_template")
    tool_use = gguf.metadata.get("tokenizer.chat_template.tool_use")
    if isinstance(own, str) and own.strip():
        tools = tool_use if isinstance(tool_use, str) else None
        return ChatTemplate(own, bos=bos, eos=eos, tool_source=tools)
    built_in = find_builtin(vocab, arch or vocab.arch, vocab.text("general.name", ""))
    return ChatTemplate(
        built_in.source, bos=bos, eos=eos, builtin=built_in.name, stop=built_in.stop
    )


def find_builtin(vocab: Vocab, arch: str, name: str) -> BuiltIn:
    """The first built-in template whose tokens, architecture and name fit; the last always does."""
    special = (TokenType.CONTROL, TokenType.USER_DEFINED)
    wanted = {piece.encode() for built_in in BUILT_INS for piece in built_in.pieces}
    found = {
        piece.decode()
        for piece, token in vocab.find(wanted).items()
        if vocab.types[token] in special
    }
    return next(
        built_in
        for built_in in BUILT_INS
        if found.issuperset(built_in.pieces)
        and (not built_in.archs or arch in built_in.archs)
        and re.search(built_in.named, name.lower())
    )
