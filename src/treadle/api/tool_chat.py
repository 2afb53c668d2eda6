"""Chat answers with tools or a reasoning budget, parsed into content, reasoning and tool calls
while they are generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from treadle.api.generation import Generation
from treadle.api.options import RULES
from treadle.base.validate import flag, listed, positive, ranged
from treadle.chat.messages import REASONING, ChatMessages, check_messages, ends_with_reasoning
from treadle.chat.prompt import ChatPrompt, PromptMedia, render_messages
from treadle.chat.template.variables import check_own, check_variables
from treadle.chat.tools import OutputPiece, ParsedOutput, ToolCall, dialect_of
from treadle.chat.tools.answer_plan import AnswerOptions, AnswerPlan, plan_answer
from treadle.chat.tools.constrained_decoding import ConstrainedDecoder
from treadle.chat.tools.messages import continued_dialect, messages_for_template
from treadle.chat.tools.output import merged
from treadle.chat.tools.python_functions import Function, check_tool, result_of, tool_of
from treadle.chat.tools.schemas import without_nulls
from treadle.errors import GrammarError, TreadleError
from treadle.grammar.compiled_cache import check_one

if TYPE_CHECKING:
    from treadle.chat.template.template import ChatTemplate
    from treadle.grammar.compiled_cache import Grammars
    from treadle.media.marks import MediaMarks
    from treadle.scheduler.request import Request
    from treadle.scheduler.scheduler import CooperativeStepper


Tool = Mapping[str, Any] | Function


class ChatModel(Protocol):
    """The attributes of ``treadle.Model`` that this module uses; ``Model`` documents their
    arguments.
    """

    @property
    def template(self) -> ChatTemplate:
        """The chat template."""

    @property
    def grammars(self) -> Grammars:
        """Cache of compiled grammars."""

    @property
    def stepper(self) -> CooperativeStepper:
        """Runs the scheduler's steps in the threads that wait for output."""

    @property
    def media_marks(self) -> tuple[MediaMarks, ...]:
        """The texts that stand for pictures and sounds in rendered prompts."""

    def prompt_ids(self, prompt: ChatPrompt) -> list[int]:
        """Return the token ids of a rendered prompt."""

    def system_end(
        self,
        ids: Sequence[int],
        messages: list[dict[str, Any]],
        render: Callable[[list[dict[str, Any]]], str],
        given: Any,
    ) -> int:
        """Return how many of a prompt's ``ids`` are its system prompt; 0 if that need not be stored
        apart. Arguments as of ``Model.system_end``.
        """

    def build_request(self, prompt: Sequence[int], **settings: Any) -> Request:
        """Return a request for the scheduler, not yet added to it."""

    def chat(self, messages: Sequence[dict[str, Any]], **settings: Any) -> Generation:
        """Answer a conversation."""


class AnswerParts:
    """An iterator over all pieces of a ``Reply``, for ``for`` and ``async for``."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._waiting: deque[OutputPiece] = deque()

    def __iter__(self) -> Iterator[OutputPiece]:
        return self

    def __next__(self) -> OutputPiece:
        while not self._waiting:
            if (new := self._reply.take_parts()) is None:
                raise StopIteration
            self._waiting += new
        return self._waiting.popleft()

    def __aiter__(self) -> AsyncIterator[OutputPiece]:
        return self

    async def __anext__(self) -> OutputPiece:
        while not self._waiting:
            if (new := await self._reply.in_thread(self._reply.take_parts)) is None:
                raise StopAsyncIteration
            self._waiting += new
        return self._waiting.popleft()


class Reply(Generation):
    """A Generation that is split: its pieces, and ``text``, have the content only.

    ``reasoning`` and ``calls`` hold the other parts of the answer; ``warnings`` lists the parts of
    a schema that are not enforced. ``message()`` returns the answer as a message, to continue the
    conversation; ``parts()`` iterates over reasoning and calls too.
    """

    def __init__(self, request: Request, stepper: CooperativeStepper, planned: AnswerPlan) -> None:
        super().__init__(request, stepper)
        self.reasoning = ""
        self.calls: list[ToolCall] = []
        self.warnings = planned.warnings
        self._scanner = planned.marks.scanner()
        self._call_parts: list[OutputPiece] = []
        self._new_parts: list[OutputPiece] | None = None  # pieces that ``parts`` has not taken
        self._parts_ended = False  # ``parts`` has come to the end
        self._n_yielded = 0  # characters of the text already yielded

    def __next__(self) -> str:
        with self._lock:
            over = False
            while not over and len(self.text) == self._n_yielded:
                over = self._advance()
            piece = self.text[self._n_yielded :]
            self._n_yielded = len(self.text)
        if not piece:
            raise StopIteration
        return piece

    def _take(self) -> str | None:
        text = self.text
        ended = self._ended
        piece = super()._take()
        last = self._ended and not ended
        said = self._scanner.feed(piece or "", last=last)
        if self._new_parts is not None:
            self._new_parts += said
        self.text = text + "".join(part.text for part in said if part.kind == "content")
        self.reasoning += "".join(part.text for part in said if part.kind == "reasoning")
        self._call_parts += [part for part in said if part.kind in ("call", "arguments")]
        if self._ended:
            self.calls = ParsedOutput.of(self._call_parts).calls
        return piece

    def parts(self) -> AnswerParts:
        """Return an iterator over the whole answer while it is generated: pieces of the kinds
        "reasoning", "content", "call" (its beginning, with the name) and "arguments"; ``async for``
        works too. Use it in place of iterating over the answer itself, which yields content only.
        """
        self._new_parts = []
        return AnswerParts(self)

    def take_parts(self) -> list[OutputPiece] | None:
        """Return the new pieces after one more step, [] if there are none yet; None at the end."""
        if self._parts_ended:
            return None
        with self._lock:
            self._parts_ended = self._advance()
            new = self._new_parts or []
            self._new_parts = []
        return merged(new)

    def _advance(self) -> bool:
        """Generate the next piece of any kind; return whether the answer has ended."""
        try:
            super().__next__()
        except StopIteration:
            return True
        return False

    def end_reasoning(self) -> bool:
        """Make the answer's reasoning end at its next token, from any thread; content follows.
        Return False if the answer cannot be in its reasoning any more.
        """
        guide = self._request.sampler.constraint
        return isinstance(guide, ConstrainedDecoder) and guide.end_reasoning()

    def message(self) -> dict[str, Any]:
        """Return the answer as an assistant message in OpenAI's form: ``content`` and, if there are
        any, ``reasoning_content`` and ``tool_calls``.
        """
        result: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            result["reasoning_content"] = self.reasoning
        if self.calls:
            result["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in self.calls
            ]
        return result


def reply(
    model: ChatModel,
    conversation: ChatMessages,
    tools: Sequence[Tool] | None,
    own: dict[str, Any],
    settings: Sequence[str],
    *,
    tool_choice: str = "auto",
    parallel: bool = True,
    reasoning_budget: int | None = None,
    reasoning_budget_message: str = "",
    continue_final_message: bool | str = True,
    template: Mapping[str, Any] | None = None,
    **variables: Any,
) -> Reply:
    """Return the answer to ``conversation``, a chat with tools or a reasoning budget, not started.

    ``tools``: functions or dicts as in OpenAI's API, None for none; ``tool_choice``: "auto",
    "required", "none" or a tool's name; ``parallel``: allow several calls in one answer;
    ``reasoning_budget``: maximum reasoning tokens, -1 for no limit; ``reasoning_budget_message`` is
    written before reasoning is ended; ``continue_final_message``: continue a last assistant
    message, or its "reasoning_content"; ``own``: keyword arguments of ``generate``; ``settings``:
    names of all settings, for errors about ``variables``; ``template``, ``variables``: of the chat
    template. Raises GrammarError and the errors of ``generate``.
    """
    check_one(*map(own.get, RULES))
    if own.get("constraint") is not None:
        raise GrammarError("constraint= cannot be combined with tools or reasoning_budget=")
    if reasoning_budget is not None:
        reasoning_budget = ranged("reasoning_budget", reasoning_budget, -1)
    parallel = flag("parallel", parallel)
    messages = conversation.messages
    by_name = tools_by_name(() if tools is None else tools)
    forced = _forced(tool_choice, by_name)
    if tool_choice == "none":
        by_name = {}
    functions = list(by_name.values())
    schemas = {name: tool["function"].get("parameters") or {} for name, tool in by_name.items()}
    dialect = dialect_of(model.template)
    within = continue_final_message == REASONING[0]
    continued = within or flag("continue_final_message", continue_final_message)
    if within and not (ends_with_reasoning(messages) and dialect.thought):
        raise TreadleError(
            "continue_final_message: no reasoning to continue: expected a last message of the "
            "assistant with reasoning_content and no content, and a model that reasons"
        )
    last = messages[-1:] if within else []
    said, shown = messages_for_template(messages[: len(messages) - len(last)], functions, dialect)
    if variables:
        check_variables(model.template, variables, settings)
    given = {**check_own(template), **variables}
    media = PromptMedia.of(conversation, model.media_marks)
    text = render_messages(
        model.template,
        [*said, *last],
        shown,
        given,
        media=media,
        continued=continued,
        within=within,
    )
    wanted = AnswerOptions(
        tools=schemas,
        strict=frozenset(f["function"]["name"] for f in functions if f["function"].get("strict")),
        forced=forced,
        parallel=parallel and tool_choice not in schemas,
        schema=own.pop("json_schema", None),
        grammar=own.pop("grammar", None),
        regex=own.pop("regex", None),
        budget=None if reasoning_budget == -1 else reasoning_budget,
        message=reasoning_budget_message,
        control=True,
    )
    grammars = model.grammars
    if continued:
        dialect = continued_dialect(messages, dialect, within=within)
    planned = plan_answer(wanted, dialect, text, grammars)
    planned = replace(planned, warnings=(*planned.warnings, *conversation.warnings))
    ids = model.prompt_ids(ChatPrompt(text, media))

    def render(messages: list[dict[str, Any]]) -> str:
        said, shown = messages_for_template(messages, functions, dialect)
        return render_messages(model.template, said, shown, given)

    system_end = model.system_end(ids, messages, render, (functions, given))
    request = model.build_request(ids, **own, plan=planned, system_end=system_end)
    return Reply(request, model.stepper, planned)


def tools_by_name(tools: Iterable[Tool]) -> dict[str, dict[str, Any]]:
    """Return tools by name, in the form of OpenAI's chat API. Raises TreadleError for an invalid
    tool, and for two of the same name.
    """
    result: dict[str, dict[str, Any]] = {}
    for tool in listed("tools", tools):
        each = without_nulls(tool) if isinstance(tool, Mapping) else tool_of(tool)
        function = each.get("function")
        if not isinstance(function, Mapping):
            raise TreadleError(f"tools: expected a dict with 'function', found {tool!r:.80}")
        name: Any = function.get("name")
        check_tool(name, function.get("parameters"))
        if name in result:
            raise TreadleError(f"tools: two have the name {name}")
        result[name] = each
    return result


def _forced(choice: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of tools one of which must be called, by ``choice``: all ``names`` for
    "required", one for a tool's name, () for "auto" and "none". Raises TreadleError for any other.
    """
    if not isinstance(choice, str):
        raise TreadleError(f"tool_choice={choice!r:.80}: expected a name")
    if choice in ("auto", "none"):
        return ()
    if choice == "required" and (every := tuple(names)):
        return every
    if choice == "required":
        raise TreadleError("tool_choice: 'required' needs at least one tool")
    if choice not in names:
        known = ", ".join(["auto", "required", "none", *names])
        raise TreadleError(f"tool_choice: {choice!r:.80} is not one of {known}")
    return (choice,)


def run_tools(
    model: ChatModel,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[Function],
    *,
    most: int = 10,
    told: Callable[[dict[str, Any]], object] | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Let a model answer a conversation and call functions, until it answers without calls. Each
    call's result is appended to the conversation.

    Return the added messages, the last of which is the answer; ``told``, unless None, is called
    with each as it is added. ``most``: maximum number of the model's answers; ``settings``: those
    of ``Model.chat``; ``tool_choice`` applies to the first answer only. The model is told of a
    function's exception. Raises TreadleError if the last allowed answer still has calls.
    """
    if not callable(getattr(model, "chat", None)):
        raise TreadleError(f"model is {type(model).__name__}: expected a treadle.Model")
    if told is not None and not callable(told):
        raise TreadleError(f"told is {type(told).__name__}: expected a function")
    check_messages(messages)
    functions = {tool_of(tool)["function"]["name"]: tool for tool in listed("tools", tools)}
    added: list[dict[str, Any]] = []

    def add(message: dict[str, Any]) -> None:
        added.append(message)
        if told is not None:
            told(message)

    for _ in range(positive("most", most)):
        made = model.chat([*messages, *added], tools=list(functions.values()), **settings)
        made.finish()
        assert isinstance(made, Reply)
        add(made.message())
        if not made.calls:
            return added
        for call in made.calls:
            result = result_of(functions[call.name], call.arguments)
            add({"role": "tool", "tool_call_id": call.id, "content": result})
        if "tool_choice" in settings:
            settings["tool_choice"] = "auto"  # a forced call would never end
    raise TreadleError(f"the model still calls functions after {most} answers")
