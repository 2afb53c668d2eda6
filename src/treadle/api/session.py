"""Sessions: one sequence of tokens in the KV cache, fed, truncated, prefilled and saved."""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from treadle.base.interrupts import interrupts_held
from treadle.base.validate import ranged, token_ids
from treadle.engine.batch import BatchItem
from treadle.engine.engine import OUTPUTS, Engine
from treadle.errors import ForkedError, TreadleError, UnsupportedError

if TYPE_CHECKING:
    from treadle.kvcache.prefix_tree import Lora


class Session:
    """A conversation's tokens and their keys and values: one sequence of the engine's cache. Use it
    as a context manager, or ``close`` it; a session without references is closed when its pages are
    needed.

    ``lora``: pairs of number and scale of the adapters to run with, None for the engine's defaults.
    ``source``: for an encoder-decoder model, the ids that the encoder reads now; the session's
    tokens are the decoder's. Raises ContextFullError if they do not fit, NoRoomError if other
    sequences hold the pages.
    """

    def __init__(self, engine: Engine, lora: Lora | None = None, source: Seq[int] = ()) -> None:
        if not hasattr(engine, "cache"):
            found = type(engine).__name__
            raise TreadleError(f"engine is {found}: use model.session() to create a session")
        self.engine = engine
        self.seq = engine.cache.sequence((), lora)
        self._closed = False
        # Whether it has pages, or may get some; stays set if a signal interrupts ``close``.
        self._has_pages = True
        if source:
            engine.attend(self.seq, source)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_has_pages", False):  # this very thread may hold the lock
            self.engine.cache.abandoned.append(self.seq)

    def __reduce__(self) -> NoReturn:  # the end of a copy would free the shared pages
        raise TypeError("a Session cannot be pickled or copied: save and load it")

    def __repr__(self) -> str:
        held = "closed" if self._closed else f"{self.n_past} of {self.engine.n_ctx} tokens"
        return f"Session({held})"

    @property
    def closed(self) -> bool:
        """Whether the session is closed, and takes no more tokens."""
        return self._closed

    @property
    def n_past(self) -> int:
        """Number of tokens that the session holds."""
        return len(self.seq)

    @property
    def ids(self) -> list[int]:
        """The token ids that the session holds."""
        return list(self.seq.ids)

    def feed(self, ids: Seq[int], *, between: Callable[[], None] | None = None) -> np.ndarray:
        """Append ``ids`` and run them. Return the logits after the last one, float32 ``[n_vocab]``.

        ``between``, unless None, is called before each batch; if it raises, the session keeps the
        batches already run. Raises ContextFullError before any run if they do not fit.
        """
        if between is not None and not callable(between):
            raise TreadleError(f"between is {type(between).__name__}: expected a function")
        return self._last(self._checked(ids), between)

    def logits(self, ids: Seq[int]) -> np.ndarray:
        """Append and run ``ids``. Return the logits after each, float32 ``[len(ids), n_vocab]``.

        Raises ContextFullError before any run if they do not fit.
        """
        return self._run(self._checked(ids), min(OUTPUTS, self.engine.max_tokens), True)

    def _last(self, ids: list[int], between: Callable[[], None] | None = None) -> np.ndarray:
        last: np.ndarray = self._run(ids, self.engine.max_tokens, False, between)[-1]
        return last

    def _run(
        self, ids: list[int], step: int, every: bool, between: Callable[[], None] | None = None
    ) -> np.ndarray:
        with self.engine.lock:
            with interrupts_held():
                self.engine.cache.check_room(self.seq, len(ids))
            rows = []
            at = 0
            while at < len(ids):
                if between is not None:
                    between()
                n = min(step, len(ids) - at)
                if every:
                    if self.engine.cache.has_media(ids):
                        n = self.engine.media.run_length(ids[at : at + n])
                    if n > OUTPUTS:
                        raise UnsupportedError(
                            f"the logits of each of {n} tokens that attend to each other (a "
                            f"picture): expected at most {OUTPUTS}"
                        )
                else:
                    n = self.engine.cache.run_length(self.seq, ids[at : at + n])
                chunk = ids[at : at + n]
                at += n
                wanted = len(chunk) if every else int(at >= len(ids))
                rows.append(self.engine.run([BatchItem(self.seq, chunk, wanted)]))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def match(self, ids: Seq[int]) -> int:
        """Replace the session's tokens by the longest prefix of ``ids`` that it holds or that the
        prefix cache has; return the prefix's length. At least the last of ``ids`` is never
        included, so that ``feed`` can run it.
        """
        return self.engine.match(self.seq, self._checked(ids))

    def prefill(self, ids: Seq[int]) -> np.ndarray:
        """Make the session hold exactly ``ids``, reusing the cached prefix. Return the logits after
        the last one, float32 ``[n_vocab]``.

        Raises ContextFullError, before anything changes, if they do not fit.
        """
        ids = self._checked(ids)
        with self.engine.lock:
            self.engine.cache.check_context(len(ids))
            return self._last(ids[self.engine.match(self.seq, ids) :])

    def truncate(self, n: int) -> None:
        """Drop all but the first ``n`` tokens."""
        self.engine.truncate(self.seq, ranged("n", n, 0, self.n_past))

    def reset(self) -> None:
        """Drop all tokens."""
        self.truncate(0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file, for ``treadle.load_session``. Raises FileError, TreadleError
        without tokens, UnsupportedError for an encoder-decoder model.
        """
        from treadle.kvcache.disk.session_file import save_session

        self._check_open()
        if not self.n_past:
            raise TreadleError("no tokens")
        if self.seq.encoded is not None:
            what = "a session over an encoder's rows cannot be saved: files have no room for these"
            raise UnsupportedError(what)
        save_session(path, self.engine, self.seq)

    def close(self) -> None:
        """Release the pages. The session takes no more tokens."""
        self._closed = True
        with suppress(ForkedError), self.engine.lock, interrupts_held():
            self.seq.close()
            self._has_pages = False

    def retire(self) -> None:
        """Close the session, but keep its pages cached for prompts with the same prefix, while
        there is room.
        """
        with self.engine.lock, interrupts_held():
            self._closed = True
            self.engine.cache.retire(self.seq)
            self._has_pages = False

    def _check_open(self) -> None:
        if self._closed:
            raise TreadleError("the session is closed")

    def _checked(self, ids: Seq[int]) -> list[int]:
        self._check_open()
        result = token_ids(ids)
        if not result:
            raise TreadleError("no tokens")
        self.engine.check_ids(result)
        return result
