"""Constrained decoding: the tokens that may come next while a model reasons, calls tools or follows
a schema.

A grammar holds after reasoning, or from the mark of a call to its end; elsewhere output is free and
no mask is computed. Reasoning ends when it exceeds its budget or after ``end_reasoning``: then only
the tokens of a message, if there is one, and of the closing mark may follow. With a budget,
reasoning is not opened again; with a budget of 0 it is never opened.

The mark of a call inside reasoning has no effect by itself, because the model may only mention it.
The grammar holds once the text after the mark is certainly a call. After the call the model may end
its output or reason on; where a call is required, this one satisfies that.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from treadle.base.fast_classes import cached_property, dataclass
from treadle.chat.tools.formats import MAX_SPACE, Thought, mark_pattern
from treadle.errors import GrammarError
from treadle.grammar.grammar import Grammar, Matcher
from treadle.tokenizer.tokenizer import Tokenizer

_BARE = re.compile(rb'\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"name"\s*:\s*")')
_MAY_BE_BARE = re.compile(rb"\s*(?:<\|?p?y?t?h?o?n?_?t?a?g?\|?>?)?\s*(?:\{[^}]{0,40})?")
_PIECES: weakref.WeakKeyDictionary[Tokenizer, list[bytes]] = weakref.WeakKeyDictionary()
_UNOPENED: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[bytes, int], bytes]] = (
    weakref.WeakKeyDictionary()
)
_OPENING: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[bytes, bool], bytes]] = (
    weakref.WeakKeyDictionary()
)
_GAP = (b"\n", b"\n\n")  # tokens that may follow reasoning
MAX_WAITED = 3  # most tokens over the budget, to complete a UTF-8 character


@dataclass(frozen=True)
class Trigger:
    """Mark at which a call begins. ``read``: text that the call grammar expects between the mark
    and the model's next text.
    """

    mark: str
    read: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[bytes]:
        """Pattern that finds the mark in an output's bytes."""
        return mark_pattern(self.mark)


@dataclass(frozen=True)
class ConstraintPlan:
    """Constraints of an answer; ``guide`` returns the decoder of one output.

    ``bound``: grammar of the whole answer, except its reasoning and a ``header`` before it.
    ``lazy``: grammar of the text after one of ``triggers``, which the model may write anywhere;
        without triggers, grammar of an answer that begins like a call.
    ``heads``: strings that may follow a trigger in the same token.
    ``drafts``: strings that confirm a call after a trigger inside reasoning: then ``bound`` holds,
        from ``trigger`` on, or ``lazy``.
    ``once``: the answer ends after the first call.
    """

    tokenizer: Tokenizer
    thought: Thought | None = None
    opened: bool = False  # the prompt opens reasoning
    may_open: bool = True  # reasoning may be opened; if not, ``bound`` holds at once
    budget: int | None = None  # tokens of reasoning
    message: str = ""  # text before the closing mark when reasoning is forced to end
    header: Grammar | None = None
    bound: Grammar | None = None
    lazy: Grammar | None = None
    triggers: tuple[Trigger, ...] = ()
    heads: tuple[bytes, ...] = ()
    drafts: tuple[bytes, ...] = ()
    trigger: str = ""
    once: bool = False

    def guide(self) -> ConstrainedDecoder:
        """Return a decoder at the start of an output."""
        return ConstrainedDecoder(self)

    @cached_property
    def pieces(self) -> list[bytes]:
        """Bytes of every token, [n_vocab]. Computed once per tokenizer: 100 ms for 128,000."""
        found = _PIECES.get(self.tokenizer)
        if found is None:
            found = _PIECES[self.tokenizer] = self.tokenizer.all_token_bytes()
        return found

    @cached_property
    def gap(self) -> list[int]:
        """Ids of the tokens that are one or two line breaks."""
        return [id for id, piece in enumerate(self.pieces) if piece in _GAP]

    def triggered(self, text: bytes) -> list[tuple[int, str]]:
        """Return the offset after each mark of a call in ``text``, in ascending order, with the
        ``read`` of its trigger.
        """
        if not (self.lazy or self.drafts):
            return []
        return sorted((m.end(), t.read) for t in self.triggers for m in t.pattern.finditer(text))

    @cached_property
    def n_kept(self) -> int:
        """Number of bytes to keep of an output's end, which may be the beginning of a
        call's mark.
        """
        if not (self.lazy or self.drafts):
            return 0
        return max((len(t.mark.encode()) + MAX_SPACE for t in self.triggers), default=0)

    def ids(self, mark: str) -> list[int]:
        """Return the token ids of a mark. If one of its control tokens ends generation, the mark is
        encoded as plain text.
        """
        found = self.tokenizer.encode(mark, bos=False, special=True)
        if self.tokenizer.eog.isdisjoint(found):
            return found
        return self.tokenizer.encode_plain(mark, start=False)

    def bits_of(self, ids: Iterable[int]) -> bytes:
        """Return a mask, one bit for each token, that allows only ``ids``."""
        allowed = np.zeros(self.tokenizer.n_vocab, np.bool_)
        allowed[list(ids)] = True
        return np.packbits(allowed, bitorder="little").tobytes()

    def bits_without(self, missing: bytes, heads: Sequence[bytes]) -> bytes | None:
        """Return a mask that forbids tokens that complete a mark and continue with text that is no
        prefix of any of ``heads``, also if it is longer than a head; a token that ends with the
        mark is allowed. ``missing``: the part of the mark still to come. None if there are no such
        tokens.
        """
        bad = [
            id
            for id, piece in enumerate(self.pieces)
            if piece.startswith(missing)
            and len(piece) > len(missing)
            and not any(head.startswith(piece[len(missing) :]) for head in heads)
        ]
        if not bad:
            return None
        return self._bits_except(bad)

    def bits_unopened(self, text: bytes) -> bytes:
        """Return a mask that forbids tokens that would open reasoning after ``text``. Cached per
        tokenizer: one mask holds for most of an answer.
        """
        assert self.thought is not None
        sign = self.thought.sign.encode()
        missing = _missing(text, sign) or sign
        made = _UNOPENED.setdefault(self.tokenizer, {})
        found = made.get((sign, len(missing)))
        if found is None:
            pieces = enumerate(self.pieces)
            bad = [id for id, p in pieces if p.startswith(missing) or sign in p]
            found = made[sign, len(missing)] = self._bits_except(bad)
        return found

    @cached_property
    def opening(self) -> list[str | int]:
        """Parts of the mark that opens reasoning: texts, and ids of control tokens."""
        return [] if self.thought is None else self.tokenizer.cut(self.thought.begin)

    def bits_opening(self, part: str | int, *, last: bool) -> bytes:
        """Return a mask of the tokens that continue ``part`` of ``opening``: beginnings of it or,
        for the ``last`` part, all of it with line breaks. Cached per tokenizer.
        """
        if isinstance(part, int):
            return self.bits_of([part])
        wanted = part.encode()
        made = _OPENING.setdefault(self.tokenizer, {})
        if (wanted, last) not in made:
            controls = {id for id in range(len(self.pieces)) if self.tokenizer.is_control(id)}
            pieces = enumerate(self.pieces)
            own = [id for id, p in pieces if p and _follows(wanted, p, last=last)]
            made[wanted, last] = self.bits_of(id for id in own if id not in controls)
        return made[wanted, last]

    @cached_property
    def unended(self) -> bytes:
        """Mask that forbids tokens that end generation: a required answer cannot end
        in reasoning.
        """
        return self._bits_except(list(self.tokenizer.eog))

    def _bits_except(self, missing: Sequence[int]) -> bytes:
        allowed = np.ones(self.tokenizer.n_vocab, np.bool_)
        allowed[list(missing)] = False
        return np.packbits(allowed, bitorder="little").tobytes()


class ConstrainedDecoder:
    """State of one output in its ``ConstraintPlan``; a ``TokenConstraint`` of the sampler."""

    def __init__(self, plan: ConstraintPlan) -> None:
        self._plan = plan
        self._text = b""  # recent text, which may end with the beginning of a mark
        self._tail = b""  # end of the text after reasoning or a call
        self._n_thought = 0  # tokens of reasoning
        self._n_due: int | None = None  # ``_n_thought`` when reasoning had to end
        self._ends = False  # ``end_reasoning`` was called
        self._forced: list[int] = []
        self._matcher: Matcher | None = None
        self._n_gap = 0
        self._draft: Matcher | None = None  # matcher of a possible call inside reasoning
        self._drafted = b""  # text of that call
        self._within = False  # the current call is inside reasoning
        self._bound: Matcher | None = None  # matcher of the answer, if reasoning is not opened
        self._opening = list(plan.opening)  # parts of the opening mark still to come
        self._headed = plan.header is None  # the header is complete
        self._state = "start"
        if plan.thought is not None and plan.opened:
            self._state = "thinking"
            self._force_close_if_due()
        elif plan.thought is None or plan.budget == 0:
            self._enter_answer()
        elif plan.bound is not None:
            if plan.may_open:
                self._bound = self._first_matcher()
            else:
                self._enter_answer()

    # -- interface of the sampler ---------------------------------------------------------------

    def bits(self) -> bytes | None:
        """Return the mask of tokens that may come next, one bit each, the lowest id in the lowest
        bit; None if all may.
        """
        self._handle_end_request()
        result: bytes | None = getattr(self, f"_bits_{self._state}")()
        return result

    def unbound(self) -> bool:
        """Return True if any token may come next; False if a mask must be computed to know."""
        self._handle_end_request()
        plan = self._plan
        if self._state in ("start", "thinking"):
            return plan.bound is None
        return self._state == "plain" and (plan.thought is None or not self._limited)

    def mask(self, logits: npt.NDArray[np.floating[Any]]) -> None:
        """Set the logits ``[n_vocab]`` of tokens that may not come next to -inf, in place. Raises
        GrammarError if no token may come next and the answer is incomplete.
        """
        if self._matcher is not None and self._state == "call":
            return self._matcher.mask(logits)
        bits = self.bits()
        if bits is not None:
            found = np.frombuffer(bits, np.uint8)
            n = min(len(logits), 8 * len(found))
            allowed = np.unpackbits(found, count=n, bitorder="little")
            if not allowed.any() and not self.accepting:
                raise GrammarError("the grammar allows no next token")
            logits[: len(allowed)][allowed == 0] = -np.inf
            logits[len(allowed) :] = -np.inf

    def accept(self, token: int) -> None:
        """Advance by ``token``. Raises GrammarError if the grammar does not allow it."""
        if token in self._plan.tokenizer.eog:
            if self._matcher is not None:
                self._matcher.accept(token)
            return
        accept: Callable[[int], None] = getattr(self, f"_accept_{self._state}")
        accept(token)

    def forced(self) -> list[int]:
        """Return the ids that must come next, if that is certain; else []."""
        self._handle_end_request()
        if self._state == "call" and self._matcher is not None:
            return self._matcher.forced()
        return list(self._forced) if self._state == "forced" else []

    @property
    def accepting(self) -> bool:
        """Whether the answer so far is complete."""
        return self._matcher is None or self._matcher.accepting

    # -- reasoning ------------------------------------------------------------------------------

    @property
    def may_reason(self) -> bool:
        """Whether reasoning is possible in this output, also if it is over."""
        return self._plan.thought is not None and self._plan.budget != 0

    def end_reasoning(self) -> bool:
        """Request that reasoning ends before the next token and does not begin again. Return False,
        without effect, if the output is not reasoning and can no longer begin to.

        Any thread may call this: the thread that samples reads the request between two tokens.
        """
        reasons = self._state in ("start", "thinking") or self._within
        if self._plan.thought is None or not reasons:
            return False
        self._ends = True
        return True

    @property
    def _limited(self) -> bool:
        """Whether reasoning that has ended may not begin again."""
        return self._ends or self._plan.budget is not None

    def _handle_end_request(self) -> None:
        """Act on a request by ``end_reasoning``."""
        if not self._ends:
            return
        if self._state == "thinking":
            self._force_close_if_due()
        elif self._state == "start" and not self._text and self._opening == self._plan.opening:
            self._enter_answer()

    def _first_matcher(self) -> Matcher:
        """Return a matcher of the header, or of the answer if there is no header."""
        assert self._plan.bound is not None
        self._headed = self._plan.header is None
        return (self._plan.header or self._plan.bound).matcher()

    def _bits_start(self) -> bytes | None:
        if self._plan.bound is None:
            return None
        own = None if self._bound is None else self._bound.bits()
        if not self._opening:
            return own
        opening = self._plan.bits_opening(self._opening[0], last=len(self._opening) == 1)
        return opening if own is None else _mask_or(own, opening)

    def _accept_start(self, token: int) -> None:
        thought = self._plan.thought
        assert thought is not None
        if self._plan.bound is None:
            return self._begins(thought, self._plan.tokenizer.token_bytes(token))
        begun = bool(self._opening) and self._opens(token)
        if begun and not self._opening:
            self._bound = None
            self._text = b""
            self._state = "thinking"
            return self._force_close_if_due()
        try:
            if self._bound is not None:
                self._bound.accept(token)
        except GrammarError:
            if not begun:
                raise
            self._bound = None
        if not begun:
            if self._bound is None:
                named = self._plan.tokenizer.piece(token)
                raise GrammarError(f"{named!r} does not continue the mark that opens reasoning")
            self._matcher = self._bound
            self._bound = None
            self._state = "call"
            self._advance_if_done()

    def _opens(self, token: int) -> bool:
        """Return whether ``token`` continues the mark that opens reasoning; if so, remove the part
        that it spells from ``_opening``.
        """
        part, *rest = self._opening
        if isinstance(part, int):
            self._opening = rest
            return token == part
        piece = self._plan.tokenizer.token_bytes(token)
        wanted = part.encode()
        if self._plan.tokenizer.is_control(token) or not _follows(wanted, piece, last=not rest):
            return False
        missing = wanted[len(piece) :].decode()
        self._opening = [missing, *rest] if missing else rest
        return True

    def _begins(self, thought: Thought, piece: bytes) -> None:
        """Read ``piece``, the bytes of a token before the answer, where the marks of ``thought``
        may open reasoning.
        """
        self._text += piece
        text = self._text.lstrip()
        mark = thought.begin.encode()
        after = thought.between.encode()
        begun = text.removeprefix(after)
        if begun.startswith(mark):
            self._text = begun[len(mark) :]
            self._state = "thinking"
            self._force_close_if_due()
        elif not (mark.startswith(begun) or after.startswith(text)):
            piece = self._text
            self._text = b""
            self._enter_answer()
            self._read_answer(piece)

    def _bits_thinking(self) -> bytes | None:
        thought = self._plan.thought
        assert thought is not None
        if self._plan.bound is None:
            return None
        missing = _missing(self._text, thought.close.encode())
        closed = self._plan.bits_without(missing, _GAP) if missing else None
        return _mask_and(closed, self._plan.unended) if closed else self._plan.unended

    def _accept_thinking(self, token: int) -> None:
        thought = self._plan.thought
        assert thought is not None
        close = thought.close.encode()
        piece = self._plan.tokenizer.token_bytes(token)
        self._n_thought += 1
        self._text += piece
        _, found, rest = self._text.partition(close)
        if found:
            self._draft = None
            self._closed()
            if self._state == "start":
                self._begins(thought, rest)
            elif rest.strip(b"\n"):
                self._read_answer(rest)
            return
        if self._plan.drafts and self._plan.triggers:
            self._drafts(token, piece)
        if self._state == "thinking":
            self._text = self._text[-max(len(close), self._plan.n_kept) :]
            self._force_close_if_due()

    def _drafts(self, token: int, piece: bytes) -> None:
        """Match ``token`` and its bytes ``piece`` against a possible call inside reasoning; once
        the call is confirmed (by a string of ``ConstraintPlan.drafts``), its grammar holds.
        """
        plan = self._plan
        if self._draft is not None:
            try:
                self._draft.accept(token)
                self._drafted += piece
            except GrammarError:
                self._draft = None
        else:
            before = len(self._text) - len(piece)
            new = [(end, read) for end, read in plan.triggered(self._text) if end > before]
            end, read = new[-1] if new else (len(self._text), "")
            self._drafted = self._text[end:]
            self._draft = self._matcher_after(self._drafted, read) if new else None
        if self._draft is not None and any(each in self._drafted for each in plan.drafts):
            self._matcher = self._draft
            self._draft = None
            self._text = b""
            self._state = "call"
            self._within = plan.bound is None

    def _matcher_after(self, rest: bytes, read: str = "") -> Matcher | None:
        """Return a matcher of the call grammar that has accepted the texts ``read`` and ``rest``;
        None if they do not begin a call.
        """
        plan = self._plan
        grammar = plan.bound or plan.lazy
        before = plan.trigger if plan.bound is not None else ""
        assert grammar is not None
        matcher = grammar.matcher()
        ids = plan.ids(before + read) if before + read else []
        try:
            if rest:
                ids += plan.tokenizer.encode_plain(rest.decode(), start=False)
            for id in ids:
                matcher.accept(id)
        except (GrammarError, UnicodeDecodeError):
            return None
        return matcher

    def _force_close_if_due(self) -> None:
        """Force the closing mark once reasoning has used up its budget or ``end_reasoning`` was
        called. Inside a UTF-8 character, wait for its end.
        """
        plan = self._plan
        spent = plan.budget is not None and self._n_thought >= plan.budget
        if plan.thought is None or not (spent or self._ends):
            return
        if self._n_due is None:
            self._n_due = self._n_thought
        if _is_cut(self._text) and self._n_thought < self._n_due + MAX_WAITED:
            return
        words = plan.message if self._ends or plan.budget else ""  # a budget of 0: no reasoning
        said = plan.tokenizer.encode_plain(words, start=False) if words else []
        self._draft = None
        self._forced = [*said, *plan.ids(plan.thought.close)]
        self._state = "forced"

    def _bits_forced(self) -> bytes:
        return self._plan.bits_of(self._forced[:1])

    def _accept_forced(self, token: int) -> None:
        del self._forced[0]
        if not self._forced:
            self._closed()

    def _closed(self) -> None:
        """Leave reasoning after its closing mark. It may begin again, as ``StreamParser`` reads it,
        unless the answer has a grammar or reasoning is limited.
        """
        self._text = b""
        if self._plan.bound is None and not self._limited:
            self._state = "start"
        else:
            self._enter_answer(gap=True)

    def _enter_answer(self, *, gap: bool = False) -> None:
        """Enter the answer; in an answer with a grammar no reasoning follows. ``gap``: line breaks
        may precede it.
        """
        plan = self._plan
        self._state = "free" if plan.lazy is not None and plan.bound is None else "plain"
        if plan.bound is not None:
            self._matcher = self._first_matcher()
            self._state = "gap" if gap else "call"
            self._n_gap = 2

    def _bits_gap(self) -> bytes:
        assert self._matcher is not None
        own = self._matcher.bits()
        return _mask_or(own, self._plan.bits_of(self._plan.gap)) if self._n_gap else own

    def _accept_gap(self, token: int) -> None:
        self._n_gap -= 1
        if self._n_gap < 0 or token not in self._plan.gap:
            self._state = "call"
            self._accept_call(token)

    # -- calls ----------------------------------------------------------------------------------

    def _bits_plain(self) -> bytes | None:
        plan = self._plan
        if plan.thought is None or not self._limited:
            return None
        return plan.bits_unopened(self._tail)

    def _bits_free(self) -> bytes | None:
        plan = self._plan
        missing = {_missing(self._text, trigger.mark.encode()) for trigger in plan.triggers} - {b""}
        own = [plan.bits_without(each, plan.heads) for each in missing]
        masks = [mask for mask in (*own, self._bits_plain()) if mask is not None]
        return reduce(_mask_and, masks) if masks else None

    def _accept_plain(self, token: int) -> None:
        self._read_answer(self._plan.tokenizer.token_bytes(token))

    def _accept_free(self, token: int) -> None:
        self._read_answer(self._plan.tokenizer.token_bytes(token))

    def _read_answer(self, piece: bytes) -> None:
        """Read ``piece``, the bytes of a token of answer text, in which a call, or reasoning again,
        may begin.
        """
        plan = self._plan
        if plan.thought is not None:
            mark = (plan.thought.sign if self._limited else plan.thought.begin).encode()
            tail = self._tail + piece
            self._tail = tail[-len(mark) :]
            if not self._limited and plan.bound is None and mark in tail:
                self._text = tail.rpartition(mark)[2]
                self._tail = b""
                self._state = "thinking"
                return
        if self._state != "free" or plan.lazy is None:
            return
        self._text += piece
        if not plan.triggers:
            found = _BARE.match(self._text)
            if found:
                self._enter(self._text[found.end() :])
            elif not _MAY_BE_BARE.fullmatch(self._text):
                self._state = "plain"
            return
        if marks := plan.triggered(self._text):
            end, read = marks[0]
            self._enter(self._text[end:], read)
        else:
            self._text = self._text[-plan.n_kept :]

    def _enter(self, rest: bytes, read: str = "") -> None:
        """Begin a call after its mark. ``rest``: the call's text in the same token as the mark's
        end; ``read``: as of ``Trigger``.
        """
        self._text, matcher = b"", self._matcher_after(rest, read)
        if matcher is not None:
            self._matcher = matcher
            self._state = "call"
        elif not self._plan.triggers:  # not a call after all
            self._state = "plain"

    def _bits_call(self) -> bytes:
        assert self._matcher is not None
        return self._matcher.bits()

    def _accept_call(self, token: int) -> None:
        assert self._matcher is not None
        self._matcher.accept(token)
        self._advance_if_done()

    def _advance_if_done(self) -> None:
        """If the current grammar is complete, go on to the next state: the answer after a header,
        reasoning, free text, or the end.
        """
        if self._matcher is None or not self._matcher.done:
            return
        if self._plan.bound is not None:
            if not self._headed:
                self._headed, self._matcher = True, self._plan.bound.matcher()
            return
        self._matcher = None
        self._tail = b""
        self._text = b""
        if self._within:
            self._within = False
            self._state = "thinking"
            return self._force_close_if_due()
        once = self._plan.once or not self._plan.triggers
        self._state = "over" if once and self._plan.tokenizer.eog else "free"

    def _bits_over(self) -> bytes:
        return self._plan.bits_of(self._plan.tokenizer.eog)

    def _accept_over(self, token: int) -> None:
        pass


def _missing(text: bytes, mark: bytes) -> bytes:
    """Return the part of ``mark`` still to come if ``text`` ends with a beginning of it, else
    empty.
    """
    for n in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-n:]):
            return mark[n:]
    return b""


def _is_cut(text: bytes) -> bool:
    """Whether ``text`` ends in the middle of a UTF-8 character."""
    for n in range(1, min(len(text), 4) + 1):
        byte = text[-n]
        if byte & 0xC0 != 0x80:  # the first byte of a character
            size = 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return n < size
    return False


def _follows(mark: bytes, piece: bytes, *, last: bool) -> bool:
    """Whether ``piece`` is a beginning of ``mark`` or, with ``last``, all of it and line breaks."""
    return mark.startswith(piece) or (last and piece.rstrip(b"\n") == mark)


def _mask_and(a: bytes, b: bytes) -> bytes:
    return (np.frombuffer(a, np.uint8) & np.frombuffer(b, np.uint8)).tobytes()


def _mask_or(a: bytes, b: bytes) -> bytes:
    n = max(len(a), len(b))
    both = np.frombuffer(a.ljust(n, b"\0"), np.uint8) | np.frombuffer(b.ljust(n, b"\0"), np.uint8)
    return both.tobytes()
