"""One text to be written, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Ids
from math import inf
from typing import TYPE_CHECKING

from treadle.errors import NoRoomError, SamplingError
from treadle.kernels.attention.page_layout import PAGE
from treadle.kernels.elementwise.top_logits import N_TOP, LogitsQuery
from treadle.spec_decode.ngram import MOST, AcceptanceTracker, Draft, Lookup

if TYPE_CHECKING:
    from treadle.api.session import Session
    from treadle.engine.logits import LogitsRow
    from treadle.kvcache.cache import KVCache, Sequence
    from treadle.kvcache.prefix_tree import Lora
    from treadle.sampling import Sampler
    from treadle.scheduler.output import RequestOutput


MEASURED = LogitsQuery(total=True)  # for log-probabilities


class Request:
    """One text to be written. ``priority``: lower ones first; requests of one ``client`` share its
    turn, None is a client of its own; with a ``session`` the text is written in its sequence.
    Without ``reuse`` its prompt is read anew, whatever session, cache and page files have of it.
    """

    def __init__(
        self,
        ids: Ids[int],
        sampler: Sampler,
        answer: RequestOutput,
        *,
        logprobs: int | None = None,
        session: Session | None = None,
        priority: int = 0,
        client: Hashable = None,
        look_ahead: float = inf,
        speculate: bool = False,
        lora: Lora = (),
        reuse: bool = True,
    ) -> None:
        self.ids = list(ids)  # of the prompt and the text
        self.sampler, self.answer, self.n_top, self.session = sampler, answer, logprobs, session
        self.priority, self.client = priority, self if client is None else client
        self.key: Hashable = None  # whose clients take turns with those of other keys
        self.look_ahead = look_ahead  # pieces written before somebody takes the first of them
        self.lora = lora if session is None else session.seq.lora  # adapters it is read with
        self.reuse = reuse
        self.lookup = Lookup() if speculate else None
        self.tracks: dict[str, AcceptanceTracker] = {}  # by source of its drafts
        self.n_accepted = 0  # of its last draft
        self.cancelled = False
        self.arrived, self.number = 0.0, 0
        self.started = 0.0  # when it was let in first
        self.place = 0  # in the queue, 1 is the next; 0: it runs, or nobody knows it yet
        self.level = priority  # its priority, as its age has made it
        self.n_known = -1  # tokens of it that the cache has; -1: to be looked up
        self.seq: Sequence | None = None  # while it runs
        self.seen = -1  # the sequence's count of changes, as the last step left it
        self.looked_at = False  # its logits are there, and its next id is being chosen
        self.short: NoRoomError | None = None  # why it does not run

    @property
    def paused(self) -> bool:
        """Whether nobody takes what was written."""
        return len(self.answer.pieces) >= self.look_ahead

    @property
    def awaited(self) -> bool:
        """Whether somebody takes its pieces as they come."""
        return self.look_ahead < inf

    @property
    def n_read(self) -> int:
        """Tokens of its prompt that need not be read any more."""
        seq = self.seq  # another thread may take it away
        n = max(self.n_known, 0) if seq is None else len(seq.ids)
        return min(n, self.answer.timings.n_prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """The lower runs, where there is no room for both."""
        return self.level, self.number

    def look_up(self, cache: KVCache) -> int:
        """Tokens of it to be had from the cache. The answer holds until ``n_known`` is -1 again."""
        if self.n_known < 0:
            self.n_known = cache.known(self.ids, self.lora) if self.reuse else 0
        return self.n_known

    def looks(self, n_rows: int = 1) -> tuple[LogitsQuery, ...]:
        """How the largest logits of the next rows are wanted."""
        look = self.sampler.look(n_rows)
        if self.n_top is not None and self.n_top <= N_TOP:
            if look is None or look.mask is None:
                return (MEASURED,)
            return MEASURED, look  # a grammar's text, measured without the grammar
        return () if look is None else (look,)

    def guess(self) -> Draft | None:
        """Ids that may come behind its last one, by its grammar or by what it has said before."""
        room = self.room
        if self.lookup is None or room <= 0:
            return None
        source, found = "grammar", self.sampler.forced()[:room]
        if not found:
            source = "text"
            found = self.lookup.guess(self.ids, min(room, self.track(source).length))
        if not found:
            return None
        track = self.track(source)
        track.guessed(len(self.ids), found)
        return Draft(found, source, track)

    @property
    def room(self) -> int:
        """Ids of a draft that fit its page and its length; 0 where it is to have none."""
        if self.lookup is None or self.seq is None:
            return 0
        n, again = len(self.ids) - 1, len(self.ids) - 1 - len(self.seq.ids)
        return min(PAGE - 1 - n % PAGE, self.answer.n_left - 1, MOST - again)

    def goes_on(self, left: int) -> bool:
        """Whether it is written, and the ``left`` ids that its sequence lacks are its last one, and
        what a state has to read again because of a draft.
        """
        if left == 1 or not self.answer.ids:
            return bool(self.answer.ids)
        seq = self.seq
        return seq is not None and seq.n_state > 0 and bool(seq.slots) and left <= MOST + 1

    def track(self, source: str) -> AcceptanceTracker:
        """How good a source's guesses were in this text."""
        return self.tracks.setdefault(source, AcceptanceTracker())

    def take(self, rows: Ids[LogitsRow], draft: Ids[int]) -> None:
        """The next ids: one from each row, up to the first that is not as it was drafted."""
        assert len(rows) == 1 + len(draft)
        n = len(self.ids)
        for row, expected in zip(rows, (*draft, None), strict=True):
            self.choose(row)
            if self.answer.done or self.ids[-1] != expected:
                break
        if self.lookup is not None and draft:
            self.n_accepted = max(len(self.ids) - n - 1, 0)
            self.answer.timings.note_draft(len(draft), self.n_accepted)

    def choose(self, row: LogitsRow) -> None:
        """The next id, from the logits behind the last one."""
        token, measured = self._sample(row), None
        if token is not None and not self.answer.is_end(token):
            self.ids.append(token)
            if self.n_top is not None:
                from treadle.sampling.logprobs import token_logprob

                measured = token_logprob(row, token, self.n_top, self.answer.tokenizer)
        self.answer.push(token, measured)

    def _sample(self, row: LogitsRow) -> int | None:
        """None where a grammar's text is whole, and its end is ruled out."""
        try:
            return self.sampler.choose(row, self.ids)
        except SamplingError:
            if self.sampler.ended:
                return None
            raise
