"""A second, smaller model that writes ahead: what it says is checked by the first, like any draft.

It reads the texts for which there is no better guess. It need not have read a text from its
beginning: what it says is a guess. So where a long text would take longer to read than drafts may
cost, it reads the end of it.

Whoever calls it holds the lock of the first model's engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, TypeVar

from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.errors import ContextFullError, UnsupportedError
from treadle.kernels.elementwise.top_logits import LogitsQuery
from treadle.kvcache.cache import Sequence
from treadle.spec_decode.ngram import StepTimes
from treadle.tokenizer.ids_only import has_vocabulary
from treadle.tokenizer.vocab import TokenType, Vocab

if TYPE_CHECKING:
    from treadle.engine.logits import LogitsBatch
    from treadle.files.gguf import GGUF

LEAST = 32  # tokens of a text that it reads at a time, at least; and before anything was measured
STEP_S = 0.06  # that it reads for at a time: others wait for it
BEFORE = 0.25  # of the first model's step, that its own takes, before that was measured
FIRST_LOOK = LogitsQuery(first=True)
K = TypeVar("K", bound=Hashable)


class DraftSequence:
    """What it has of one text: ``seq`` holds ids from ``start`` on, ``n`` of which are the text's;
    what is behind them was drafted.
    """

    def __init__(self, seq: Sequence, start: int) -> None:
        self.seq, self.start, self.n = seq, start, 0

    def settle(self, ids: Ids[int]) -> int:
        """Drop what was drafted and is not in the text; how many of its ids are to be read, the
        last one included.
        """
        seq, end = self.seq, len(ids) - 1 - self.start
        while self.n < min(len(seq), end) and seq.ids[self.n] == ids[self.start + self.n]:
            self.n += 1
        seq.n_drafted = 0
        if self.n < len(seq):
            seq.cache.truncate(seq, self.n)
        return len(ids) - self.start - self.n


class Drafter:
    """Writes ahead with ``engine``, which shares its device with that of the first model, of
    ``n_vocab`` tokens.
    """

    def __init__(
        self, engine: Engine, n_vocab: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock, self._before = clock, BEFORE
        self.engine, self._n_vocab = engine, min(n_vocab, engine.config.n_vocab)
        self._texts: dict[Hashable, DraftSequence] = {}
        self._steps = StepTimes()  # of texts that go on by one token
        self._token_s = 0.0  # of what it reads

    def keep(self, owners: Collection[Hashable]) -> None:
        """Forget the texts of all others."""
        for owner in [owner for owner in self._texts if owner not in owners]:
            self._texts.pop(owner).seq.close()

    def seconds(self, n_texts: int, n_ids: int, step_s: float) -> float:
        """What ``n_ids`` behind each of so many texts will take, where the first model's step takes
        ``step_s``.
        """
        if not self._steps:
            return n_ids * self._before * step_s
        return n_ids * self._steps.predicted(n_texts)

    def knows(self, owner: Hashable, ids: Ids[int]) -> bool:
        """Whether it has read a text, but for at most the last LEAST ids."""
        text = self._texts.get(owner)
        return (
            text is not None
            and text.settle(ids) <= LEAST
            and max(ids[text.start + text.n :]) < self._n_vocab
            and len(ids) - text.start + LEAST <= self.engine.n_ctx
        )

    def read(self, owner: Hashable, ids: Ids[int], within_s: float) -> None:
        """Read what it lacks of a text, or the first part of that. Where all of it takes longer
        than ``within_s``, it begins nearer to the end.
        """
        text, most = self._texts.get(owner), self.engine.n_ctx // 2
        may = min(int(within_s / self._token_s), most) if self._token_s else LEAST
        lacks = len(ids) if text is None else text.settle(ids)
        if text is None or lacks > may or len(ids) - text.start + LEAST > self.engine.n_ctx:
            if may < min(LEAST, len(ids)):
                return
            if text is not None:
                text.seq.close()
            text = DraftSequence(
                self.engine.cache.sequence(), max(len(ids) - may, self._first(owner))
            )
            self._texts[owner] = text
        step = max(int(STEP_S / self._token_s), LEAST) if self._token_s else LEAST
        at = text.start + text.n
        part = ids[at : min(at + min(step, self.engine.max_tokens), len(ids) - 1)]
        if not part or max(part) >= self._n_vocab:
            return
        began = self._now()
        try:
            self._read(owner, text, part)
        except ContextFullError:  # others hold its pages
            self._texts.pop(owner).seq.close()
        else:
            text.n += len(part)
            self._token_s = (self._now() - began) / len(part)

    def write(self, wanted: Mapping[K, tuple[Ids[int], int]]) -> dict[K, list[int]]:
        """What it thinks comes next: of each owner its text, which it ``knows``, and how many ids
        are wanted behind.
        """
        made: dict[K, list[int]] = {owner: [] for owner in wanted}
        for i in range(max((n for _, n in wanted.values()), default=0)):
            going = [owner for owner, (_, n) in wanted.items() if n > i and len(made[owner]) == i]
            parts = [self._part(owner, wanted[owner][0], made[owner]) for owner in going]
            if not parts or sum(len(part.ids) for part in parts) > self.engine.max_tokens:
                break
            began = self._now()
            try:
                rows = self._sample(going, parts)
            except ContextFullError:  # others hold its pages
                break
            if all(len(part.ids) == 1 for part in parts):
                self._steps.note(len(parts), self._now() - began)
            for owner, row in zip(going, rows, strict=True):
                assert row.top is not None
                _, token = row.top.first
                if 0 <= token < self._n_vocab:
                    made[owner].append(token)
        return made

    def _first(self, owner: Hashable) -> int:
        """Where in a text it may begin to read."""
        return 0

    def _read(self, owner: Hashable, text: DraftSequence, ids: Ids[int]) -> None:
        """Read what comes next in a text."""
        self.engine.run([BatchItem(text.seq, ids, 0)])

    def _sample(self, owners: Ids[Hashable], parts: list[BatchItem]) -> LogitsBatch:
        """What comes behind each of these texts' parts."""
        return self.engine.sample(parts)

    def _part(self, owner: Hashable, ids: Ids[int], behind: list[int]) -> BatchItem:
        text = self._texts[owner]
        text.seq.n_drafted = len(behind)  # nobody is to find a page with these
        return BatchItem(text.seq, behind[-1:] or ids[text.start + text.n :], 1, (FIRST_LOOK,))

    def _now(self) -> float:
        """Seconds, but for those that kernels were compiled in."""
        return self._clock() - self.engine.kernels.seconds

    def close(self) -> None:
        """Let go of the second model."""
        self.keep(())
        self.engine.close()
        self.engine.gguf.close()


def check_vocabularies(model: GGUF, draft: GGUF) -> None:
    """Raise UnsupportedError, with the first difference, where ids of one are not those of the
    other. Ids that one alone has must be unused: files are padded differently. Where neither file
    has a vocabulary there is nothing to compare, and a draft is checked as any other.
    """
    lacking = [file for file in (model, draft) if not has_vocabulary(file)]
    if len(lacking) == 2:
        return
    if lacking:
        raise UnsupportedError(
            f"{draft.path}: drafts for {model.path} need its vocabulary, and {lacking[0].path} "
            "has none"
        )
    a, b = Vocab(model), Vocab(draft)
    n = min(a.n, b.n)
    for id, (own, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if own != other:
            raise UnsupportedError(
                f"{draft.path}: drafts for {model.path} need its vocabulary: token {id} is "
                f"{other!r:.60} here and {own!r:.60} there"
            )
    longer = a if a.n > n else b
    used = [id for id in range(n, longer.n) if longer.types[id] != TokenType.UNUSED]
    if used:
        raise UnsupportedError(
            f"{draft.path}: drafts for {model.path} need its vocabulary: of {a.n} and {b.n} tokens "
            f"{used[0]} is {longer.tokens[used[0]]!r:.60} in {longer.path} alone"
        )


def open_drafter(draft: GGUF, engine: Engine) -> Drafter:
    """A drafter for ``engine``, on its device. Raises UnsupportedError where ``draft`` cannot go
    back to an earlier token, has another vocabulary, or writes no text.
    """
    from treadle.models.graphs import GRAPHS
    from treadle.models.load import load_config

    config = load_config(draft)
    check_vocabularies(engine.gguf, draft)
    if "logits" not in GRAPHS[config.arch.graph].outputs:
        raise UnsupportedError(f"{draft.path}: {config.arch.name} writes no text, so no drafts")
    n_ctx = min(engine.n_ctx, config.n_ctx_train)
    made = Engine(
        draft,
        config,
        engine.device,
        n_ctx=n_ctx,
        kv=engine.cache.kv,
        n_sequences=engine.cache.n_sequences,
        kv_tokens=engine.cache.kv_tokens,
    )
    if made.cache.states:
        raise UnsupportedError(
            f"{draft.path}: what it drafts is taken back, and layers of {config.arch.name} keep a "
            "state, which cannot go back"
        )
    return Drafter(made, engine.config.n_vocab)
