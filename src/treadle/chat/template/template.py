"""Chat templates: from messages to the text that a model was trained to answer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from treadle.base.cached_property import cached_property
from treadle.base.fast_dataclass import dataclass
from treadle.chat.template.builtin_templates import BUILT_INS, BuiltIn
from treadle.chat.template.messages import ContentForm, Message, form_of, plain, read_messages
from treadle.chat.template.variables import AUTO, is_off, reasoning_default, with_reasoning
from treadle.errors import TemplateError
from treadle.tokenizer.vocab import TokenType, Vocab

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

_FUNCTIONS, _XML_TOOLS = ("functions", "datetime"), ("xml_tools",)
_OTHER_NAMES: tuple[tuple[str, ...], ...] = (_FUNCTIONS, _XML_TOOLS)
MAX_SOURCE = 1 << 20  # characters of a template; the longest known ones have 30,000
OWN = "the model's file"  # where a template came from
# Variables that are a token's text, as transformers gives them, beside bos_token and eos_token.
_SPECIALS = ("unk", "sep", "pad", "cls", "mask")
# English, whatever the locale: models were trained on these.
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


class ChatTemplate:
    """A jinja2 template, rendered as transformers' ``apply_chat_template`` does it.

    ``bos`` and ``eos`` are the texts the template knows as ``bos_token`` and ``eos_token``;
    ``tool_source`` is the template to use when tools are given, if that is another one.
    ``builtin`` names the built-in template that this is, or is None for a file's own; ``stop``
    are texts that end an answer where no token of the template does.
    ``origin`` says where it came from. ``specials`` are further variables that are tokens' texts;
    ``defaults`` are variables where a rendering says nothing, and ``reasoning`` is whether a model
    is to reason there: "on", "off", or "auto" for what the template does by itself.
    A template that is not built in is rendered in a process of its own (``renderer``), started when
    it is first used.
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
        origin: str = OWN,
        specials: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        reasoning: str = AUTO,
    ) -> None:
        self.source = source
        self.bos, self.eos = bos, eos
        self.tool_source = tool_source
        self.builtin = builtin
        self.stop = tuple(stop)
        self.origin = origin
        self.specials = dict(specials or {})
        self.defaults, self.reasoning = dict(defaults or {}), reasoning
        self._forms: dict[str, ContentForm] = {}

    def __repr__(self) -> str:
        kind = f"built-in {self.builtin}" if self.builtin else f"from {self.origin}"
        return f"ChatTemplate({kind}, {len(self.source)} characters)"

    def prepare(self) -> None:
        """Start what renders, which takes 60 to 100 ms, without waiting for it."""
        if not self.builtin and len(self.source) <= MAX_SOURCE:
            from treadle.chat.template.renderer import RENDERER

            with suppress(TemplateError):  # the rendering will say it
                RENDERER.prepare(self.source)

    def check(self) -> None:
        """Raise TemplateError, with the line, for a template that does not compile."""
        for source in filter(None, (self.source, self.tool_source)):
            self._renderer(source).check(source)

    def variables(self) -> frozenset[str]:
        """The names that the template reads from whoever renders it. Raises TemplateError."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        sources = filter(None, (self.source, self.tool_source))
        return frozenset(n for source in sources for n in self._renderer(source).names(source))

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **vars: Any,
    ) -> str:
        """The prompt for ``messages``, each with ``role`` and ``content``.

        ``content`` is a text or a list of parts, whichever the template itself reads. The result
        spells control tokens: encode it with ``special=True``. ``vars`` are more variables for
        the template (``enable_thinking=False``). Raises TemplateError, with the line, when the
        template is broken, refuses the messages, or takes more time or memory than it may;
        UnsupportedError for parts that are no text.
        """
        source = self.tool_source if tools and self.tool_source is not None else self.source
        variables = {
            **self._dates(),
            **self.specials,
            "bos_token": self.bos,
            "eos_token": self.eos,
            "documents": None,
            **plain(with_reasoning(self, vars)),
            "tools": plain(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        variables = {**self._own_tools(tools), **variables}
        said = read_messages(messages)
        form = self._form(source, variables)
        return self._render(source, variables, [form.shape(message) for message in said])

    @property
    def default_reasoning(self) -> str:
        """Whether the model is to reason where a rendering says nothing: "auto", "on", "off"."""
        return reasoning_default(self)

    def is_off(
        self,
        variables: Mapping[str, Any],
        reasoning: str | None = None,
        budget: int | None = None,
    ) -> bool:
        """Whether the model must not reason: `treadle.chat.template.variables.is_off`."""
        return is_off(self, variables, reasoning, budget)

    def _dates(self) -> dict[str, str]:
        """Today, under each name of it that the template reads: without it Llama 3.1's tells the
        model the day that it was written. (A time would be another at each call, and no prompt
        would be found in the cache.)
        """
        now = datetime.now()
        dates = {
            "date_string": f"{now:%d} {_MONTHS[now.month - 1]} {now:%Y}",
            "datetime": f"{_MONTHS[now.month - 1]} {now:%d} {now:%Y}",  # as llama.cpp gives it
            "current_date": f"{now:%Y-%m-%d}",
        }
        source = f"{self.source}{self.tool_source or ''}"
        return {name: date for name, date in dates.items() if name in source}

    def _own_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Tools under the names that Firefunction's and SmolLM3's have for them."""
        made: dict[str, Any] = _functions(tools) if _FUNCTIONS in self._other_names else {}
        if tools and _XML_TOOLS in self._other_names:
            made["xml_tools"] = _inner(tools)
        return made

    @cached_property
    def _other_names(self) -> list[tuple[str, ...]]:
        """Of these names those that it reads, all of a family's."""
        maybe = [names for names in _OTHER_NAMES if all(name in self.source for name in names)]
        return [names for names in maybe if self.variables().issuperset(names)]

    def _form(self, source: str, variables: dict[str, Any]) -> ContentForm:
        """What a template takes for content, found out once."""

        def render(messages: list[dict[str, Any]]) -> str | None:
            from treadle.chat.template.renderer import LimitError

            try:
                return self._render(source, variables, messages)
            except LimitError:
                raise
            except TemplateError:
                return None

        if source not in self._forms:
            self._forms[source] = form_of(source, render)
        return self._forms[source]

    def _render(
        self, source: str, variables: dict[str, Any], messages: list[dict[str, Any]]
    ) -> str:
        variables = {**variables, "messages": messages}
        try:
            return self._run(source, variables)
        except TemplateError as e:
            if variables["tools"] is not None or "NoneType" not in str(e):
                raise
            # Templates made for tools loop over them without a look whether there are any.
            try:
                return self._run(source, {k: v for k, v in variables.items() if k != "tools"})
            except TemplateError:
                pass
            raise

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        text: str = self._renderer(source).render(source, variables, datetime.now())
        return text

    def _renderer(self, source: str) -> Any:
        """What renders: for our own templates this process, for there is nothing to fear."""
        if self.builtin:
            from treadle.chat.template import sandbox

            return sandbox
        if len(source) > MAX_SOURCE:
            raise TemplateError(
                f"chat template: {len(source)} characters (expected at most {MAX_SOURCE})"
            )
        from treadle.chat.template.renderer import RENDERER

        return RENDERER


def _inner(tools: Sequence[Mapping[str, Any]] | None) -> list[Any]:
    """What stands in each tool's ``function``."""
    return [tool.get("function", tool) for tool in plain(tools) or ()]


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """The variable of Firefunction's template, which raises without it: its tools as text."""
    return {"functions": json.dumps(_inner(tools), indent=4, ensure_ascii=False)}


@dataclass(frozen=True)
class ChosenTemplate:
    """A template that somebody chose in place of a file's own; ``override.py`` reads one.

    ``builtin``: the built-in template's name, or None. ``origin``: where it came from, in words,
    without a folder's name. ``stop``: texts that end an answer.
    """

    source: str
    origin: str
    builtin: str | None = None
    stop: tuple[str, ...] = ()


def load_template(
    gguf: GGUF, arch: str = "", chosen: ChosenTemplate | None = None, **settings: Any
) -> ChatTemplate:
    """The chat template of a model file, or the built-in one that the file names in its place, or
    that fits its tokens and ``arch``.

    ``.builtin`` of the result says which. Files may carry further templates by name; the one
    named ``tool_use`` is taken when tools are given. ``chosen`` takes the place of all of these;
    ``settings`` are those of ``ChatTemplate``. Raises FileError and UnsupportedError as
    ``load_tokenizer`` does.
    """
    vocab = Vocab(gguf)
    spelt = {
        name: vocab.raw(vocab.specials[name]).decode("utf-8", "replace")
        for name in ("bos", "eos", *_SPECIALS)
        if name in vocab.specials
    }
    bos, eos = (spelt.pop(name, "") for name in ("bos", "eos"))
    settings["specials"] = {f"{name}_token": text for name, text in spelt.items()}
    if chosen is not None:
        return ChatTemplate(
            chosen.source,
            bos=bos,
            eos=eos,
            builtin=chosen.builtin,
            stop=chosen.stop,
            origin=f"{chosen.origin}, by option",
            **settings,
        )
    own = gguf.metadata.get("tokenizer.chat_template")
    tool_use = gguf.metadata.get("tokenizer.chat_template.tool_use")
    named = next((each for each in BUILT_INS if each.name == own), None)
    if isinstance(own, str) and own.strip() and named is None:
        tools = tool_use if isinstance(tool_use, str) else None
        return ChatTemplate(own, bos=bos, eos=eos, tool_source=tools, **settings)
    built_in = named or find_builtin(vocab, arch or vocab.arch, vocab.text("general.name", ""))
    why = "named by the file" if named else "the file has none"
    return ChatTemplate(
        built_in.source,
        bos=bos,
        eos=eos,
        builtin=built_in.name,
        stop=built_in.stop,
        origin=f"built-in {built_in.name}, {why}",
        **settings,
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
