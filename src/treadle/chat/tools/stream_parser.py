"""Streaming parser of model output: separates reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from typing import Any

from treadle.base.fast_classes import dataclass
from treadle.base.text_overlap import overlap
from treadle.chat.tools.argument_readers import ArgumentReader, JsonReader, reader_of
from treadle.chat.tools.arguments import CallObject, is_object, read_call
from treadle.chat.tools.formats import (
    Channels,
    Thought,
    ToolCallFormat,
    begun_mark,
    core_of,
    find_mark,
)
from treadle.chat.tools.output import KINDS, OutputPiece, ToolCall, merged

MAX_HEAD = 300  # characters between the mark of a call and its arguments
MAX_DRAFTS = 64  # most possible calls tried in reasoning; each failed one is read twice


@dataclass(frozen=True)
class AnswerMarks:
    """Marks to look for in an answer: reasoning between those of ``thought``, which the prompt may
    have ``opened``; calls of ``tools`` (schemas by name) in the format ``row``.

    ``streams``: arguments are output as they arrive, else when their call is complete. ``sure``: a
    grammar holds from a call's mark on; so a call cut short is output with the arguments written so
    far, and one without a complete name is dropped. Without it such text is content. ``forced``:
    only calls are output.
    """

    thought: Thought | None = None
    opened: bool = False
    within: bool = False  # the prompt ends inside the reasoning's text
    channels: Channels | None = None  # the answer is messages with headers
    row: ToolCallFormat | None = None
    begun: bool = False  # the prompt ends with the row's ``open``
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True  # several calls; if not, output after the first is dropped
    streams: bool = False
    sure: bool = False
    forced: bool = False

    def scanner(self) -> StreamParser:
        """Return a parser for one answer."""
        return StreamParser(self)


class StreamParser:
    """Streaming parser of one answer. Text that may be the beginning of a mark is held back.

    Each state has a method ``_in_STATE(last)``, which reads held text, may change the state, and
    returns the pieces that are certain now. ``last``: no more text follows.
    """

    def __init__(self, marks: AnswerMarks) -> None:
        self._marks = marks
        self._row = marks.row
        self._state = "content"
        self._next = "start"
        if marks.within:
            self._state = "reasoning"
        elif marks.channels is not None:
            self._state = "header"
        elif marks.begun:
            self._state = "head"
        elif marks.thought is not None:
            self._state = "gap"
            self._next = "reasoning" if marks.opened else "start"
        elif marks.row is not None:
            self._state = "start"
        self._buffer = ""
        self._breaks = ""  # line breaks that stood before the last mark
        self._has_content = False  # content has been output
        self._draft: StreamParser | None = None  # parser of a possible call inside reasoning
        self._drafted: list[OutputPiece] = []  # pieces from ``_draft``
        self._n_fed = 0  # characters of the buffer given to ``_draft``
        self._n_drafts = 0  # number of failed drafts
        self._raw = ""  # text of a possible call, output as content if it is none
        self._object, self._reader = CallObject(), ArgumentReader()
        self._call: ToolCall | None = None  # the call being read
        self._begun = False  # its "call" piece has been output
        self._written = ""  # JSON of its arguments so far
        self._ids: set[str] = set()  # ids of all calls
        self.n_calls = 0  # number of complete calls

    def feed(self, text: str, *, last: bool = False) -> list[OutputPiece]:
        """Read ``text``; return the pieces that are certain now. ``last``: no more text follows, so
        nothing is held back.
        """
        self._buffer += text
        out: list[OutputPiece] = []
        while True:
            before = self._state, len(self._buffer)
            out += getattr(self, f"_in_{self._state}")(last)
            if (self._state, len(self._buffer)) == before:
                break
        self._has_content |= any(part.kind == "content" for part in out)
        if self._marks.forced:  # any content is the beginning of a mark that was cut
            out = [part for part in out if part.kind != "content"]
        return merged(out)

    @property
    def in_reasoning(self) -> bool:
        """Whether the text read so far ends inside reasoning."""
        return "reasoning" in (self._state, self._next if self._state == "gap" else "")

    @property
    def undecided(self) -> bool:
        """Whether the end of the text read so far may be reasoning; text still to come decides."""
        return self._state in ("draft", "aside")

    @property
    def content_state(self) -> tuple[bool, int | None]:
        """Whether the parser is in content, and the number of characters at the end of the text
        that are still undecided; None: all characters since the mark of a call.
        """
        if self._state in ("content", "rest", "start"):
            return True, len(self._buffer)
        sure = self._marks.sure
        call = ("aside", "head", "between", *(() if sure else ("arguments", "tail", "close")))
        return False, None if self._state in call else 0

    # -- outside calls --------------------------------------------------------------------------

    def _in_gap(self, last: bool) -> list[OutputPiece]:
        """Handle the state beside a mark: drop line breaks; at other text enter the state
        ``_next``. Return no pieces.
        """
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer or last:
            self._state = self._next
        return []

    def _skip_breaks(self, rest: str, state: str) -> None:
        """Drop line breaks after a mark, then go to ``state``. ``rest``: text after the mark."""
        self._buffer = rest
        self._state = "gap"
        self._next = state

    def _in_start(self, last: bool) -> list[OutputPiece]:
        """Handle the state before any output: drop white space if a mark follows it. Return the
        pieces that are certain now.
        """
        text = self._buffer.lstrip()
        row = self._row
        thought = self._marks.thought
        marks = [] if thought is None else [thought.begin]
        bare = row is not None and not row.trigger
        if row is not None and bare and row.lead:
            marks.append(row.lead)
        if thought is not None and text.startswith(thought.begin):
            self._skip_breaks(text[len(thought.begin) :], "reasoning")
        elif row is not None and bare and (text.startswith("{") or _begins(text, row.lead)):
            self._raw = row.lead if _begins(text, row.lead) else ""
            self._buffer = text.removeprefix(row.lead)
            self._state = "head"
        elif last or (text and not any(mark.startswith(text) for mark in marks)):
            self._state = "content"
        return []

    def _in_reasoning(self, last: bool) -> list[OutputPiece]:
        marks = self._marks
        thought = marks.thought or (marks.channels and marks.channels.thought)
        assert thought
        calls = self._call_marks() if self._n_drafts < MAX_DRAFTS else ()
        ends = (thought.close, *thought.ends)
        text, found = self._until((*ends, *calls), last)
        if found in ends:
            after = "content" if self._has_content else "start"
            self._skip_breaks(self._buffer, "header" if marks.channels else after)
        elif found:
            own = replace(marks, thought=None, opened=False, begun=False, within=False)
            own = replace(own, parallel=True, streams=False, sure=False, forced=False)
            self._draft = own.scanner()
            self._drafted = []
            self._raw = found
            self._buffer = found + self._buffer
            self._n_fed = 0
            self._state = "draft"
            self._draft._ids = self._ids
        return [OutputPiece("reasoning", text)]

    def _call_marks(self) -> tuple[str, ...]:
        """Return the marks at which a call may begin inside reasoning."""
        row = self._row
        channels = self._marks.channels
        if row is None or not row.trigger:
            return ()
        marks = (row.trigger,) if row.by_header else row.starts
        return (channels.start, *marks) if channels else marks

    def _in_draft(self, last: bool) -> list[OutputPiece]:
        """Handle the state after the mark of a call inside reasoning. If only calls and the end of
        the answer follow, they end the reasoning; if other text follows, all of it is reasoning.
        Return the pieces that are certain now.
        """
        draft = self._draft
        mark = self._raw
        assert draft is not None
        self._drafted += draft.feed(self._buffer[self._n_fed :])
        whole = draft._state != "arguments"  # readers may take cut arguments for complete ones
        self._drafted += draft.feed("", last=True) if last and whole else []
        self._n_fed = len(self._buffer)
        other = any(part.text.strip() for part in self._drafted if part.kind in KINDS)
        if other or (last and not draft.n_calls):
            self._n_drafts = self._n_drafts + 1
            self._raw = ""
            self._buffer = self._buffer[len(mark) :]
            self._state = "reasoning"
            return [OutputPiece("reasoning", self._breaks + mark)]
        if not last:
            return []
        self._buffer = ""
        self._state = "end"
        first = self.n_calls
        calls = [p._replace(number=first + p.number) for p in self._drafted if p.kind not in KINDS]
        if not self._marks.parallel:
            calls = [part for part in calls if part.number == first]
        self.n_calls += sum(part.call is not None for part in calls)
        return calls

    def _in_aside(self, last: bool) -> list[OutputPiece]:
        """Handle the state after an opening mark of reasoning inside content: the text is reasoning
        up to the closing mark, or content if that does not come. Return the pieces that are certain
        now.
        """
        thought = self._marks.thought
        assert thought is not None
        text, found, rest = self._buffer.partition(thought.close)
        if found:
            self._skip_breaks(rest, "content")
            return [OutputPiece("reasoning", text.strip("\n"))]
        if last:
            self._state = "content"
            return [OutputPiece("content", self._raw)]
        return []

    def _in_content(self, last: bool) -> list[OutputPiece]:
        row = self._row
        channels = self._marks.channels
        thought = self._marks.thought
        marks = [] if channels is None else [channels.end]
        stray: tuple[str, ...] = ()
        if channels is None and thought is not None:
            marks = [thought.begin, *thought.stray]
            stray = thought.stray
        if row is not None and row.trigger and not row.by_header:
            marks += row.starts
        if not marks:
            return self._in_rest(last)
        text, found = self._until(marks, last)
        if found and channels is None and thought is not None:
            if found in stray:
                return [OutputPiece("content", text + self._breaks)]
            if found == thought.begin:
                self._raw = found
                if thought.reserved:
                    self._skip_breaks(self._buffer, "reasoning")
                else:
                    self._state = "aside"
                return [OutputPiece("content", text + self._breaks)]
        cut = text.rstrip()
        if last and self._marks.sure and row is not None and row.sign and cut.endswith(row.sign):
            text = cut.removesuffix(row.sign).rstrip("\n")  # the call's mark was cut short
        if found:
            self._raw = found
            ended = channels is not None and found == channels.end
            self._state = "header" if ended else self._behind_mark(found)
        return [OutputPiece("content", text)]

    def _in_header(self, last: bool) -> list[OutputPiece]:
        """Read the header of a message, once it is complete, and enter the state of the message's
        text. Return no pieces.
        """
        channels = self._marks.channels
        assert channels is not None
        if not channels.message:
            return self._in_mark(channels, last)
        header, found, body = self._buffer.partition(channels.message)
        if not found and not self._may_be_header(channels, last):
            self._state = "content"
            return []
        if not (found or last):
            return []
        self._buffer, to = body, channels.call.search(header) if channels.call else None
        if to is not None and not found and to.end() == len(header):
            to = None  # the name was cut
        own = to is not None and (found or self._marks.sure) and self._row is not None
        if to is not None and own and to.group(1) in self._marks.tools:
            self._begin(to.group(1), JsonReader())
        elif not found:
            self._state = "end"
        else:
            self._state = "content" if channels.is_for_user(header) else "reasoning"
        return []

    def _may_be_header(self, channels: Channels, last: bool) -> bool:
        """Whether the held text may begin a header; if not, it is content."""
        text = self._buffer.lstrip()
        if any(text.startswith(head) for head in channels.heads):
            return len(text) < MAX_HEAD
        begun = any(head.startswith(text) for head in channels.heads)
        return not text or (begun and (not last or text.startswith("<|")))  # a mark that was cut

    def _in_mark(self, channels: Channels, last: bool) -> list[OutputPiece]:
        """Read the mark that is the header of the next message, and enter the state of its text; a
        message without a mark is content. Return no pieces.
        """
        text = self._buffer.lstrip().removeprefix(channels.start).lstrip()
        states = {channels.thought.open: "reasoning", channels.final: "content"}
        starts = () if self._row is None or self._row.by_header else self._row.starts
        states |= dict.fromkeys(channels.calls, "reasoning")  # replaced below if there are tools
        states |= {mark: self._behind_mark(mark) for mark in starts}
        found = next((mark for mark in states if text.startswith(mark)), "")
        if found:
            self._raw = found
            self._buffer = text[len(found) :]
            self._state = states[found]
        elif not any(mark.startswith(text) for mark in (channels.start, *states)):
            self._buffer = text
            self._state = "content"
        elif last:
            self._state = "end"
        return []

    def _behind_mark(self, mark: str) -> str:
        """Return the state after a mark of calls: "between" if it wraps several calls, "head" if it
        begins one.
        """
        row = self._row
        if row is None or not row.open or not row.wrap[0]:
            return "head"
        return "between" if find_mark(mark, row.wrap[0]) == (0, mark) else "head"

    def _in_end(self, last: bool) -> list[OutputPiece]:
        self._buffer = ""
        return []

    def _in_rest(self, last: bool) -> list[OutputPiece]:
        text = self._buffer
        self._buffer = ""
        return [OutputPiece("content", text)]

    # -- calls ----------------------------------------------------------------------------------

    def _in_head(self, last: bool) -> list[OutputPiece]:
        """Read the tool's name, between the mark of a call and its arguments. Return pieces only
        for text that is no call after all.
        """
        row = self._row
        text = self._buffer
        assert row is not None
        if row.style == "object":
            return self._in_object(last)
        end, kept = row.head_end
        head, found, rest = text.partition(end)
        if not found and not last and len(text) < MAX_HEAD:
            return []
        rest = end + rest if found and kept else rest
        id, said = row.split_head(head)
        name, _, own = said.partition(row.id_mark) if row.id_mark else (said, "", "")
        id = "" if row.numbered else own or id
        id = f"functions.{said}" if row.named_ids else id
        if found and row.content and name == row.content:
            self._raw = ""
            self._buffer = rest
            self._state = "content"
            return []
        if last and not found:
            name = self._named(said)
            id = "" if row.id_mark else id
            if not (self._marks.sure and name):
                return self._cut()
        elif name not in self._marks.tools:
            return self._no_call()
        self._raw = self._raw + text[: len(text) - len(rest)]
        self._buffer = rest
        self._begin(name, reader_of(row, self._marks.tools[name]), id)
        return []

    def _in_object(self, last: bool) -> list[OutputPiece]:
        """Read a call's JSON object: with a grammar (``sure``) up to its arguments, else to its
        end, because it may not be a call. Return pieces only for text that is no call after all.
        """
        held = self._buffer.lstrip()
        object = self._object
        assert self._row is not None
        if held and not held.startswith("{"):
            return self._no_call()
        if not held and not last:
            return []
        self._raw = self._raw + self._buffer[: len(self._buffer) - len(held)]
        self._buffer = held
        object.walk(held)
        name = object.name
        at = object.arguments_at
        begun = self._marks.sure and name in self._marks.tools
        if begun and (at is not None or (last and object.end is None)):
            at = len(held) if at is None else at
            self._raw = self._raw + held[:at]
            self._buffer = held[at:]
            self._begin(str(name), JsonReader())
        elif object.end is not None and name and name == self._row.content:
            self._raw = ""
            self._buffer = held[object.end :]
            self._object = CallObject()
            self._state = "between"
        elif object.end is not None:
            found = read_call(held[: object.end], self._marks.tools, at)
            if found is None:
                return self._no_call()
            self._begin(found[0], ArgumentReader())
            self._written = found[1]
            self._buffer = held[object.end :]
            self._state = "close"
        elif last:
            known = name is None or name == (self._row.content or None)
            return self._cut() if known else self._no_call()
        return []

    def _named(self, head: str) -> str:
        """Return the tool whose name is complete in ``head``, which ends within the mark after the
        name; "" if there is none.
        """
        assert self._row is not None
        mark = self._row.id_mark or self._row.after
        for name in self._marks.tools:
            rest = head.removeprefix(name)
            if mark and rest != head and rest and (mark.startswith(rest) or rest.startswith(mark)):
                return name
        return ""

    def _begin(self, name: str, reader: ArgumentReader, id: str = "") -> None:
        assert self._row is not None
        id = self._row.new_id() if id in ("", *self._ids) else id  # some models repeat an id
        self._ids.add(id)
        self._call = ToolCall(id, name, "")
        self._reader = reader
        self._state = "arguments"
        self._begun = False
        self._written = ""

    def _in_arguments(self, last: bool) -> list[OutputPiece]:
        held = self._buffer
        if not self._written:
            held = held.lstrip()
            if isinstance(self._reader, JsonReader) and not held.startswith("{"):
                if held:
                    return self._no_call()
                if not last:  # a piece of a call must not be output before it is certain
                    return []
        sure = self._marks.sure
        streams = self._marks.streams
        fragment, rest = self._reader.take(held, last and not sure)
        self._raw += self._buffer[: len(self._buffer) - len(rest)]
        self._buffer = rest
        self._written = self._written + fragment
        out = self._tell(fragment) if streams else []
        if self._reader.done:
            assert self._row is not None
            self._state = "tail" if self._row.style == "object" else "close"
            self._reader = JsonReader(1)
        elif last and not sure:
            return self._no_call()
        elif last:
            self._state = "end"
            return out if streams else self._tell(self._written)
        return out

    def _in_tail(self, last: bool) -> list[OutputPiece]:
        """Skip the rest of a call's object after the arguments. Return no pieces."""
        _, self._buffer = self._reader.take(self._buffer, last)
        if self._reader.done or last:
            self._state = "close"
        return []

    def _in_close(self, last: bool) -> list[OutputPiece]:
        """Handle the state after a call: skip its closing mark, and return the call's pieces that
        have not been output.
        """
        row = self._row
        call = self._call
        assert row is not None
        assert call is not None
        if not self._marks.sure and not is_object(self._written):
            return self._no_call()
        behind = self._buffer.lstrip()
        close = row.close
        if close and behind.startswith(close):
            self._buffer = behind[len(close) :]
        elif close and close.startswith(behind):
            if not last:
                return []  # its closing mark may still come
            self._buffer = ""
        out = self._tell("" if self._begun else self._written)
        self.n_calls += 1
        self._raw = ""
        self._call = None
        self._object = CallObject()
        if not self._marks.parallel:
            self._state = "end"
        elif row.wrap[0]:
            self._state = "between"
        elif row.by_header:
            self._state = "header"
        else:  # no calls follow a bare call
            self._skip_breaks(self._buffer, "content" if row.trigger else "rest")
        return out

    def _in_between(self, last: bool) -> list[OutputPiece]:
        """Handle the state between calls of a format that wraps them: begin the next call, or
        content after the closing mark. Return pieces only for text that is no call.
        """
        row = self._row
        assert row is not None
        text = self._buffer.lstrip().removeprefix(row.between.strip()).lstrip()
        end = row.wrap[1].lstrip()
        open = row.first.lstrip()
        if text.startswith(end):
            self._skip_breaks(text[len(end) :], "header" if self._marks.channels else "content")
        elif text.startswith(open) and text and not end.startswith(text):
            size = len(open) if row.open else 0
            self._raw += text[:size]
            self._buffer = text[size:]
            self._state = "head"
        elif text and not end.startswith(text) and not open.startswith(text):
            return self._no_call()
        elif last:
            return self._cut()
        return []

    def _tell(self, fragment: str) -> list[OutputPiece]:
        out: list[OutputPiece] = []
        if not self._begun:
            out.append(OutputPiece("call", "", self._call, self.n_calls))
            self._begun = True
        if fragment:
            out.append(OutputPiece("arguments", fragment, None, self.n_calls))
        return out

    def _no_call(self) -> list[OutputPiece]:
        """Return text that looked like a call as content; text after it is content too. In formats
        of messages with headers it is reasoning, because such a message is not for the user.
        """
        said = self._raw
        self._raw = ""
        self._object = CallObject()
        if self._marks.channels:  # a message that is not for the user
            self._state = "reasoning"
            return [OutputPiece("reasoning", said)]
        trigger = self._row is not None and self._row.trigger
        self._state = "content" if trigger else "rest"
        return [OutputPiece("content", said)]

    def _cut(self) -> list[OutputPiece]:
        """Handle output that ends within the mark of a call or before its name is complete: drop it
        with a grammar (``sure``), else it is content.
        """
        assert self._row is not None
        if not (self._marks.sure and (self._row.trigger or self._raw)):
            return self._no_call()
        self._buffer = ""
        self._state = "end"
        return []

    def _until(self, marks: Iterable[str], last: bool) -> tuple[str, str]:
        """Take the held text up to the first of ``marks``, with the mark and the line breaks before
        it. Return the text without these, and the mark as written, "" if there is none; then the
        text ends before what may begin a mark, unless it is the ``last``.
        """
        starts = () if self._row is None else self._row.starts
        found = []
        for mark in marks:
            written = find_mark(self._buffer, mark) if mark in starts else None
            if mark not in starts and (at := self._buffer.find(mark)) >= 0:
                written = at, mark
            if written is not None:
                found.append((written[0], -len(written[1]), written[1]))
        at, _, mark = min(found, default=(0, 0, ""))
        longer = [core_of(m)[0] if m in starts else m for m in marks]
        if not last and any(m != mark and m.startswith(self._buffer[at:]) for m in longer):
            mark = ""  # it may be the beginning of a longer one
        if mark:
            text = self._buffer[:at].rstrip("\n")
            self._buffer = self._buffer[at + len(mark) :]
            self._breaks = "\n" * (at - len(text))
            return text, mark
        text = self._buffer
        if not last:
            begun = [begun_mark(text, m) if m in starts else overlap(text, m) for m in marks]
            text = text[: len(text) - max(begun)].rstrip("\n")
        self._buffer = self._buffer[len(text) :]
        return text, ""


def _begins(text: str, mark: str) -> bool:
    return bool(mark) and text.startswith(mark)
