"""A generation request, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from collections.abc import Sequence as Seq
from math import inf
from typing import TYPE_CHECKING, Any

from treadle.base.fast_classes import dataclass
from treadle.engine.batch import MOST_DRAFTED
from treadle.engine.logits import N_TOP, LogitsQuery
from treadle.errors import NoRoomError, SamplingError

if TYPE_CHECKING:
    import numpy as np

    from treadle.api.session import Session
    from treadle.engine.logits import LogitsRow
    from treadle.kvcache.cache import KVCache, Sequence
    from treadle.kvcache.media import MediaEntry
    from treadle.kvcache.prefix_tree import Lora
    from treadle.sampling import Sampler
    from treadle.scheduler.output import RequestOutput
    from treadle.spec_decode.ngram import AcceptanceTracker, Lookup


MEASURED = LogitsQuery(total=True)  # for log-probabilities
# A generator that yields between slices of work and returns float32 ``[n_rows, width]`` of each of
# several pictures or sounds.
Encoding = Generator[None, None, "list[np.ndarray]"]


@dataclass(frozen=True, eq=False)
class MediaEncoder:
    """Encoder of one picture or sound of a request.

    begin: begins to encode a list of the ``prepared`` of several encoders together. prepared: the
    decoded and resized picture or sound. shape: encoders of equal shapes can be used together; each
    result has the bits that it has alone. n_patches: rows of the tower's inputs.
    """

    begin: Callable[[Seq[Any]], Encoding]
    prepared: Any
    shape: Hashable
    n_patches: int


@dataclass(frozen=True, eq=False)
class MediaUsage:
    """A picture or sound of a prompt, of the ``kind`` "image" or "audio". ``n_tokens``: its rows in
    the prompt. ``size`` and ``resized``: height and width in pixels, as given and as the model sees
    it; of a sound, 1 and its number of samples.
    """

    kind: str
    n_tokens: int
    size: tuple[int, int]
    resized: tuple[int, int]


class MediaPrompt(list[int]):
    """Token ids of a prompt, with rows of pictures or sounds.

    ``encoders``: the encoder of each of its pictures and sounds, in the order of their first rows;
    ``usage``: their tokens and sizes, in the same order. ``n_bytes``: memory that prepared inputs
    take until they are encoded.
    """

    def __init__(
        self,
        ids: Iterable[int],
        encoders: Mapping[MediaEntry, MediaEncoder],
        usage: Seq[MediaUsage],
        n_bytes: int = 0,
    ) -> None:
        super().__init__(ids)
        self.n_bytes = n_bytes
        self.encoders = dict(encoders)
        self.usage = tuple(usage)


class Request:
    """One generation request. ``sampler`` chooses its tokens, ``answer`` receives them.

    ``priority``: lower runs first. Requests of one ``client`` share its turn; None: a client of its
    own. ``look_ahead``: pieces of output that may wait for the caller before the request pauses.
    ``logprobs``: number of alternatives with log-probabilities, None for none. ``speculate``:
    whether to draft. ``lora``: adapters to run with.

    With a ``session``, tokens go to the session's sequence. Without ``reuse`` the whole prompt is
    computed, whatever session, cache and page files hold. ``media``: the pictures and sounds in
    ``ids``, in the order of their first rows, each with its encoder. ``system_end``: the number of
    ids up to the end of the system prompt, 0 if unknown: layer states are kept there. ``source``:
    the ids that the encoder of an encoder-decoder model reads; ``ids`` are the decoder's.
    """

    def __init__(
        self,
        ids: Seq[int],
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
        media: Mapping[MediaEntry, MediaEncoder] | None = None,
        system_end: int = 0,
        source: Seq[int] = (),
    ) -> None:
        self.ids = list(ids)  # prompt and output
        self.source = tuple(source)
        # The same without rows of pictures and sound, for samplers and drafts.
        self.text_ids = self.ids
        if media:
            rows = {id for entry in media for id in entry.ids}
            self.text_ids = [id for id in self.ids if id not in rows]
        self.media = dict(media or {})
        self.holds_media = False  # while it is queued or runs
        self.sampler = sampler
        self.answer = answer
        self.n_top = logprobs
        self.session = session
        self.priority = priority
        self.client = self if client is None else client
        self.key: Hashable = None  # clients of one key take turns with those of other keys
        self.look_ahead = look_ahead  # pieces written ahead of the caller before the request pauses
        self.lora = lora if session is None else session.seq.lora  # adapters to run with
        self.reuse = reuse
        self.system_end = system_end
        self.speculates = speculate
        self.lookup: Lookup | None = None  # of n-grams in its text, from the first draft on
        self.tracks: dict[str, AcceptanceTracker] = {}  # by source of its drafts
        self.n_accepted = 0  # tokens accepted of its last draft
        self.cancelled = False
        self.arrived = 0.0
        self.number = 0
        self.started = 0.0  # time of its first admission
        self.queue_position = 0  # position in the queue from 1; 0: running, or not queued yet
        self.effective_priority = priority  # priority adjusted by age
        self.n_known = -1  # tokens that the cache has; -1: not looked up
        self.seq: Sequence | None = None  # set while it runs
        self.last_n_changes = -1  # ``n_changes`` of the sequence after the last step
        self.is_sampling = False  # its logits are computed, and its next token is being sampled
        self.room_error: NoRoomError | None = None  # the pages that it lacks, if any

    @property
    def paused(self) -> bool:
        """Whether the request has stopped until its caller takes pieces."""
        return len(self.answer.pieces) >= self.look_ahead

    @property
    def is_streamed(self) -> bool:
        """Whether the caller takes pieces as they are produced."""
        return self.look_ahead < inf

    @property
    def n_read(self) -> int:
        """Number of prompt tokens that are computed, or known to be cached."""
        seq = self.seq  # read once: another thread may clear it
        n = max(self.n_known, 0) if seq is None else len(seq.ids)
        return min(n, self.answer.timings.n_prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key, (level, number): if there is no room for two requests, the one with the lower
        key runs.
        """
        return self.effective_priority, self.number

    def look_up(self, cache: KVCache) -> int:
        """Return how many of the request's tokens ``cache`` holds as a prefix. The number is kept
        in ``n_known``; -1 there means that it has to be looked up again.
        """
        if self.n_known < 0:
            self.n_known = cache.n_cached_tokens(self.ids, self.lora) if self.reuse else 0
        return self.n_known

    def queries(self, n_rows: int = 1) -> tuple[LogitsQuery, ...]:
        """Return queries for the ``n_rows`` next logits rows, which make the engine return only
        each row's largest logits; () if sampling needs whole rows.
        """
        query = self.sampler.query(n_rows)
        if self.n_top is not None and self.n_top <= N_TOP:
            if query is None or query.mask is None:
                return (MEASURED,)
            return (
                MEASURED,
                query,
            )  # with a grammar: log-probabilities are measured without its mask
        return () if query is None else (query,)

    def is_decoding(self, left: int) -> bool:
        """Return whether the request decodes in this step, with ``left`` ids missing from its
        sequence: the last id, and perhaps those that a layer state must recompute because a draft
        was rejected.
        """
        if left == 1 or not self.answer.ids:
            return bool(self.answer.ids)
        seq = self.seq
        return seq is not None and seq.n_state > 0 and bool(seq.slots) and left <= MOST_DRAFTED + 1

    def take(self, rows: Seq[LogitsRow], draft: Seq[int]) -> None:
        """Sample a token from each of ``rows``, the logits after the last token and after each
        token of ``draft``, up to the first sampled token that differs from the draft or ends the
        output.
        """
        assert len(rows) == 1 + len(draft)
        n = len(self.ids)
        for row, expected in zip(rows, (*draft, None), strict=True):
            self.choose(row)
            if self.answer.done or self.ids[-1] != expected:
                break
        if self.speculates and draft:
            self.n_accepted = max(len(self.ids) - n - 1, 0)
            self.answer.timings.note_draft(len(draft), self.n_accepted)

    def choose(self, row: LogitsRow) -> None:
        """Sample the next token from ``row``, the logits after the request's last token, and push
        it to the output.
        """
        token = self._sample(row)
        measured = None
        if token is not None and not self.answer.is_end(token):
            self.ids.append(token)
            if self.text_ids is not self.ids:
                self.text_ids.append(token)
            if self.n_top is not None:
                from treadle.sampling.logprobs import token_logprob

                measured = token_logprob(row, token, self.n_top, self.answer.tokenizer)
        self.answer.push(token, measured)

    def _sample(self, row: LogitsRow) -> int | None:
        """Return a token sampled from the logits ``row``; None if the grammar is complete and its
        end token is banned.
        """
        try:
            return self.sampler.choose(row, self.text_ids)
        except SamplingError:
            if self.sampler.ended:
                return None
            raise
