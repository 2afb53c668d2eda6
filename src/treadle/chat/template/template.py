"""Chat templates: render messages to the prompt format that a model was trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import cached_property, dataclass
from treadle.chat.messages import Message, has_media, plain, read_messages, text_part
from treadle.chat.template.builtin_templates import BUILT_INS, BuiltIn
from treadle.chat.template.content_form import ContentForm, form_of
from treadle.chat.template.role_formats import NAMES, find_named
from treadle.chat.template.variables import AUTO, is_off, reasoning_default, with_reasoning
from treadle.errors import TemplateError
from treadle.tokenizer.vocab import TokenType, Vocab

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF

_FUNCTIONS = ("functions", "datetime")
_XML_TOOLS = ("xml_tools",)
_OTHER_NAMES: tuple[tuple[str, ...], ...] = (_FUNCTIONS, _XML_TOOLS)
MAX_SOURCE = 1 << 20  # characters of a template; the longest known has 30,000
OWN = "the model's file"  # default origin of a template
# Tokens whose text is a template variable, as in transformers, besides bos_token and eos_token.
_SPECIALS = ("unk", "sep", "pad", "cls", "mask")
# English in any locale: models were trained on these.
_MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


class ChatTemplate:
    """Jinja2 chat template, rendered as transformers' ``apply_chat_template`` does.

    ``bos``, ``eos``: texts of the template's ``bos_token`` and ``eos_token``.
    ``tool_source``: source used when tools are given; None: ``source``.
    ``builtin``: name of the built-in template, None for a file's own.
    ``stop``: strings that end an answer, for templates that end answers without a token.
    ``origin``: where the template comes from, for error messages.
    ``specials``: further variables that are texts of special tokens, such as ``pad_token``.
    ``defaults``: template variables used if a call does not set them.
    ``reasoning``: reasoning mode if a call does not set it: "on", "off", or "auto" for the
        template's own behaviour.
    ``preserve``: whether earlier answers keep their reasoning in the prompt, for templates with a
        variable for it; None: the template's default.

    A template that is not built in is rendered in a separate process (``renderer``), which is
    started at first use.
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
        preserve: bool | None = None,
    ) -> None:
        self.source = source
        self.bos = bos
        self.eos = eos
        self.tool_source = tool_source
        self.builtin = builtin
        self.stop = tuple(stop)
        self.origin = origin
        self.specials = dict(specials or {})
        self.defaults = dict(defaults or {})
        self.reasoning = reasoning
        self.preserve = preserve
        self._forms: dict[str, ContentForm] = {}
        self._written: dict[tuple[str, str, tuple[str, ...]], bool] = {}

    def __repr__(self) -> str:
        kind = f"built-in {self.builtin}" if self.builtin else f"from {self.origin}"
        return f"ChatTemplate({kind}, {len(self.source)} characters)"

    def prepare(self) -> None:
        """Start the rendering process (60 to 100 ms) without waiting for it."""
        if not self.builtin and len(self.source) <= MAX_SOURCE:
            from treadle.chat.template.renderer import RENDERER

            with suppress(TemplateError):  # the rendering will report it
                RENDERER.prepare(self.source)

    def check(self) -> None:
        """Raise TemplateError, with the line, for a template that does not compile."""
        for source in filter(None, (self.source, self.tool_source)):
            self._renderer(source).check(source)

    def variables(self) -> frozenset[str]:
        """Return the names of all variables that the template reads. Raises TemplateError if it
        cannot be parsed.
        """
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
        """Render the prompt for ``messages``, each with ``role`` and ``content``.

        ``content`` is a string or a list of parts, in any form: it is converted to the one that the
        template reads. The result spells control tokens: encode it with ``special=True``. ``vars``
        are more template variables (``enable_thinking=False``). Raises TemplateError, with the
        line, when the template is broken, refuses the messages, or exceeds its time or memory
        limit; UnsupportedError for parts that are not text.
        """
        return self.render_read(
            read_messages(messages),
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            **vars,
        )

    def render_read(
        self,
        messages: Sequence[dict[str, Any]],
        placeholders: Mapping[str, Sequence[str]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **vars: Any,
    ) -> str:
        """Render the messages of a ``ChatMessages``, which are not checked again; otherwise as
        ``render``.

        ``placeholders``: the texts that stand for a picture and for a sound in the model's prompts,
        by type of part. If the template writes one of them for a part of a user message, it is
        given the part; otherwise the first text replaces the part.
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
        form = self._form(source, variables)
        if placeholders and any(has_media(message.get("content")) for message in messages):
            written = {
                kind
                for kind, texts in placeholders.items()
                if self._writes(source, variables, form, kind, tuple(texts))
            }
            messages = [form.place_media(each, placeholders, written) for each in messages]
        return self._render(source, variables, [form.shape(message) for message in messages])

    @property
    def default_reasoning(self) -> str:
        """Default reasoning mode of calls that set none: "auto", "on" or "off"."""
        return reasoning_default(self)

    def is_off(
        self,
        variables: Mapping[str, Any],
        reasoning: str | None = None,
        budget: int | None = None,
    ) -> bool:
        """Whether reasoning is disabled for an answer, by the call's ``reasoning``, template
        ``variables`` and ``budget`` (tokens), as in ``variables.is_off``.
        """
        return is_off(self, variables, reasoning, budget)

    def _dates(self) -> dict[str, str]:
        """Return today's date under each of its names that the template reads.

        Without it Llama 3.1's template states the day it was written. There is no time of day: it
        would change with each call and defeat the prefix cache.
        """
        now = datetime.now()
        dates = {
            "date_string": f"{now:%d} {_MONTHS[now.month - 1]} {now:%Y}",
            "datetime": f"{_MONTHS[now.month - 1]} {now:%d} {now:%Y}",  # in llama.cpp's format
            "current_date": f"{now:%Y-%m-%d}",
        }
        source = f"{self.source}{self.tool_source or ''}"
        return {name: date for name, date in dates.items() if name in source}

    def _own_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the tools under the variable names that only Firefunction's and SmolLM3's
        templates read.
        """
        result: dict[str, Any] = _functions(tools) if _FUNCTIONS in self._other_names else {}
        if tools and _XML_TOOLS in self._other_names:
            result["xml_tools"] = _inner(tools)
        return result

    @cached_property
    def _other_names(self) -> list[tuple[str, ...]]:
        """The groups of variable names in ``_OTHER_NAMES`` of which the template reads every
        variable.
        """
        maybe = [names for names in _OTHER_NAMES if all(name in self.source for name in names)]
        return [names for names in maybe if self.variables().issuperset(names)]

    def _form(self, source: str, variables: dict[str, Any]) -> ContentForm:
        """Return the content form that ``source`` reads, detected at the first call by rendering
        with ``variables``.
        """

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

    def _writes(
        self,
        source: str,
        variables: dict[str, Any],
        form: ContentForm,
        kind: str,
        texts: tuple[str, ...],
    ) -> bool:
        """Whether ``source`` writes one of ``texts``, placeholders, for a part of type ``kind`` in
        a user message; detected at the first call by rendering with ``variables``. ``form``: the
        content form that ``source`` reads.
        """
        key = (source, kind, texts)
        if key not in self._written:
            message = {"role": "user", "content": [{"type": kind}, text_part("-")]}
            rendered = ""
            if form.keeps_parts(message):
                with suppress(TemplateError):
                    rendered = self._render(source, {**variables, "tools": None}, [message])
            self._written[key] = any(text in rendered for text in texts)
        return self._written[key]

    def _render(
        self, source: str, variables: dict[str, Any], messages: list[dict[str, Any]]
    ) -> str:
        variables = {**variables, "messages": messages}
        try:
            return self._run(source, variables)
        except TemplateError as e:
            if variables["tools"] is not None or "NoneType" not in str(e):
                raise
            # Templates made for tools loop over them without checking that there are any.
            try:
                return self._run(source, {k: v for k, v in variables.items() if k != "tools"})
            except TemplateError:
                pass
            raise

    def _run(self, source: str, variables: dict[str, Any]) -> str:
        text: str = self._renderer(source).render(source, variables, datetime.now())
        return text

    def _renderer(self, source: str) -> Any:
        """Return the renderer of a source: this process for built-in templates, which are trusted,
        else the process pool. Raises TemplateError for a source that is too long.
        """
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
    """Return the ``function`` object of each tool."""
    return [tool.get("function", tool) for tool in plain(tools) or ()]


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> dict[str, str]:
    """Return the ``functions`` variable, the tools as JSON text: Firefunction's template raises
    without it.
    """
    return {"functions": json.dumps(_inner(tools), indent=4, ensure_ascii=False)}


@dataclass(frozen=True)
class ChosenTemplate:
    """Template that the user chose in place of the file's own; ``override.choose_template`` makes
    it.

    ``builtin``: the built-in template's name, or None. ``origin``: where it comes from, for
    messages, without folder names. ``stop``: stop strings. ``named``: the name of a template in the
    model's file, from which ``load_template`` reads the source; else None.
    """

    source: str
    origin: str
    builtin: str | None = None
    stop: tuple[str, ...] = ()
    named: str | None = None


def load_template(
    gguf: GGUF, arch: str = "", chosen: ChosenTemplate | None = None, **settings: Any
) -> ChatTemplate:
    """Return a model file's chat template, or else the built-in one that the file names or that
    fits its special tokens and ``arch``.

    A file's template named ``tool_use`` is used when tools are given. ``chosen`` replaces all of
    these; ``settings`` are keyword arguments of ``ChatTemplate``. The result's ``builtin`` is None
    for a file's template. Raises FileError and UnsupportedError as ``load_tokenizer`` does, and
    TemplateError if the file has no template of the chosen name.
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
            chosen.source if chosen.named is None else _named_source(gguf, chosen.named),
            bos=bos,
            eos=eos,
            builtin=chosen.builtin,
            stop=chosen.stop,
            origin=f"{chosen.origin}, by option",
            **settings,
        )
    own = gguf.metadata.get("tokenizer.chat_template")
    tool_use = gguf.metadata.get("tokenizer.chat_template.tool_use")
    named = find_named(own)
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


def _named_source(gguf: GGUF, name: str) -> str:
    """Return the source of the file's template called ``name``; "default" is the one without a
    name. Raises TemplateError if there is none.
    """
    key = "tokenizer.chat_template"
    found = {
        "default" if at == key else at.removeprefix(f"{key}."): value
        for at, value in gguf.metadata.items()
        if at == key or at.startswith(f"{key}.")
    }
    source = found.get(name)
    if isinstance(source, str) and source.strip():
        return source
    own = f"has the templates {', '.join(sorted(found))}" if found else "has no template"
    raise TemplateError(
        f"chat template {name!r} is not a file, nor a template of {gguf.path.name}, which {own}: "
        f"expected a file{', one of these,' if found else ''} or a built-in one: {', '.join(NAMES)}"
    )


def find_builtin(vocab: Vocab, arch: str, name: str) -> BuiltIn:
    """Return the first of BUILT_INS that fits the vocabulary, architecture and ``name`` (the file's
    ``general.name``); the last fits every file.
    """
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
