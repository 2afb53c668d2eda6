"""Chooses each step's drafts. Grammar-forced and n-gram drafts cost nothing; a second model or an
MTP layer drafts for the other requests, if that pays.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from treadle.engine.batch import MOST_DRAFTED
from treadle.engine.engine import NO_OBSERVER
from treadle.errors import FileError, TreadleError
from treadle.kvcache.page_pool import PAGE
from treadle.spec_decode.ngram import AcceptanceTracker, Draft, DraftController, Lookup

if TYPE_CHECKING:
    from treadle.engine.engine import Engine, EngineObserver
    from treadle.files.gguf import GGUF
    from treadle.scheduler.request import Request
    from treadle.spec_decode.draft_model import Drafter

MODEL = "model"  # source of the second model's drafts

Drafts = dict["Request", list[int]]


class Drafting:
    """Makes drafts for steps of at most ``max_tokens``. ``clock`` returns seconds; ``cost``:
    seconds that the last drafts took to make.
    """

    def __init__(self, max_tokens: int, clock: Callable[[], float]) -> None:
        self.controller = DraftController()
        self._most = max_tokens
        self._clock = clock
        self.drafter: Drafter | None = None
        self._opened: Drafter | None = None  # kept after a failure, to be closed
        self.cost = 0.0

    def open(self, draft: GGUF | None, engine: Engine, speculate: bool | None) -> bool:
        """Open the drafter of the file ``draft``, which ``close`` closes too. Without a file, open
        the model's own MTP layer, if there is one and ``speculate`` is not False. Return whether
        requests have drafts by default: True with a file; else ``speculate``, or if that is None
        whether a drafter is open.

        Raises FileError or UnsupportedError for the file ``draft``; warns if the MTP layer cannot
        be used.
        """
        if draft is None:
            own = (speculate is None or bool(speculate)) and self._open_own(engine)
            return own or bool(speculate)
        from treadle.spec_decode.open import open_draft  # imported late: rarely used

        try:
            self.drafter = self._opened = open_draft(draft, engine)
        except BaseException:
            draft.close()
            raise
        return True

    def _open_own(self, engine: Engine) -> bool:
        may_have = engine.config.arch.nextn and engine.has_states
        if may_have and any(".nextn." in name for name in engine.gguf.tensors):
            from treadle.models.graphs.nextn import has_nextn  # imports the graphs

            if has_nextn(engine.gguf, engine.config):
                from treadle.spec_decode.mtp import open_nextn  # imported late: rarely used

                try:
                    self.drafter = self._opened = open_nextn(engine)
                except FileError as error:
                    warnings.warn(f"MTP drafting is off: {error}", stacklevel=4)
        return self.drafter is not None

    @property
    def observer(self) -> EngineObserver:
        """The observer of the first model's runs: the drafter's, or one that does nothing."""
        return NO_OBSERVER if self.drafter is None else self.drafter.observer

    def close(self) -> None:
        """Close the second model, if one is open. The caller holds the engine's lock."""
        self.drafter = None
        if self._opened is not None:
            self._opened.close()

    def make(self, decoding: list[Request], running: list[Request]) -> Drafts:
        """Return draft ids by request, for those of the ``decoding`` requests whose drafts pay.
        ``running``: all requests; the drafter forgets any others.
        """
        self.cost = 0.0
        if self.drafter is not None:
            self.drafter.keep_only(running)
        drafts, right = self._free_drafts(decoding)
        if self.drafter is not None and self.controller.times and self.controller.loss_left_s >= 0:
            began = self._clock()
            compiled = self.drafter.engine.kernels.seconds
            left = [
                request for request in decoding if request not in drafts and most_ids(request) > 0
            ]
            drafter = self.drafter
            try:
                drafts |= self._model_drafts(drafter, len(decoding), left, drafts, right)
            # for example, its file shrank: requests continue without it
            except TreadleError as error:
                self.drafter = None
                warnings.warn(f"drafting stopped: {error}", stacklevel=2)
            self.cost = self._clock() - began - (drafter.engine.kernels.seconds - compiled)
        return drafts

    def _free_drafts(self, decoding: list[Request]) -> tuple[Drafts, float]:
        """Return, for requests of ``decoding``, the drafts that cost nothing to make
        (grammar-forced ids and n-grams), and how many of their ids are expected to be accepted.
        """
        controller = self.controller
        found = []
        for request in decoding:
            for source, track in request.tracks.items():
                controller.note_share(source, track.compare_guess(request.ids))
            if guess := propose(request):
                found.append((controller.expected_of_draft(guess), request, guess))
        if not found:
            return {}, 0.0
        found.sort(key=lambda each: -each[0] / len(each[2].ids))
        n = controller.choose(len(decoding), [guess for *_, guess in found], self._most)
        chosen = found[:n]
        return {request: guess.ids for _, request, guess in chosen}, sum(r for r, *_ in chosen)

    def _model_drafts(
        self, drafter: Drafter, n: int, left: list[Request], drafts: Drafts, right: float
    ) -> Drafts:
        """Return the drafts of ``drafter`` for those of the requests ``left`` for which they pay,
        in a step of ``n`` requests; prefill a chunk of one request that cannot be drafted yet.

        ``drafts``: those that other requests of the step have already, of which ``right`` ids are
        expected to be accepted.
        """
        controller = self.controller
        promised = []
        for request in left:
            track = track_of(request, MODEL)
            length = min(most_ids(request), track.length)
            promised.append((controller.expected_of_source(MODEL, track, length), length, request))
        promised.sort(key=lambda each: -each[0] / each[1])
        n_drafted = sum(map(len, drafts.values()))
        step_s = controller.times.predicted(n)
        if not promised or n + n_drafted >= self._most:
            return {}
        # As many as gain most together; else one id, to measure whether drafting pays by now.
        best = 0
        top = max(controller.gain(n, n_drafted, right), 0.0)
        ids = n_drafted
        longest = 0
        for i, (more, length, _) in enumerate(promised, 1):
            ids = ids + length
            right = right + more
            longest = max(longest, length)
            gain = controller.gain(n, ids, right, drafter.seconds(i, longest, step_s))
            if gain > top and n + ids <= self._most:
                best = i
                top = gain
        chosen = {request: length for _, length, request in promised[:best]}
        if not best and controller.allows(n, n_drafted + 1, 0.0, drafter.seconds(1, 1, step_s)):
            chosen = {promised[0][2]: 1}
        known = {r: (r.ids, length) for r, length in chosen.items() if drafter.can_draft(r, r.ids)}
        for request in chosen:
            if request not in known:  # one per step
                drafter.prefill_chunk(request, request.ids, controller.loss_left_s)
                break
        made = drafter.draft_ids(known)
        return {request: own for request in known if (own := _usable(request, made[request]))}


def propose(request: Request) -> Draft | None:
    """Return a draft from the request's grammar or from repetition in its own tokens, or None."""
    room = most_ids(request)
    if room <= 0:
        return None
    source = "grammar"
    found = request.sampler.forced()[:room]
    if not found:
        source = "text"
        if request.lookup is None:
            request.lookup = Lookup()
        length = min(room, track_of(request, source).length)
        found = request.lookup.guess(request.text_ids, length)
    if not found:
        return None
    track = track_of(request, source)
    track.note_guess(len(request.ids), found)
    return Draft(found, source, track)


def most_ids(request: Request) -> int:
    """Return the number of draft tokens that fit the sequence's last page and the token limit; 0 or
    less means no draft.
    """
    if not request.speculates or request.seq is None:
        return 0
    n = len(request.ids) - 1
    again = len(request.ids) - 1 - len(request.seq.ids)
    return min(PAGE - 1 - n % PAGE, request.answer.n_left - 1, MOST_DRAFTED - again)


def track_of(request: Request, source: str) -> AcceptanceTracker:
    """Return the acceptance tracker of a request's drafts from ``source``, the name of a kind of
    draft.
    """
    return request.tracks.setdefault(source, AcceptanceTracker())


def _usable(request: Request, ids: list[int]) -> list[int]:
    """Cut a draft before its first end token, since ending is decided by the sampler, and record
    the rest as the request's guess. Return it.
    """
    eog = request.answer.tokenizer.eog
    end = next((i for i, token in enumerate(ids) if token in eog), len(ids))
    if end:
        track_of(request, MODEL).note_guess(len(request.ids), ids[:end])
    return ids[:end]
