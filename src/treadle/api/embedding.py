"""Text embeddings: the last layer's normed states, pooled as the file says (usually their mean),
then multiplied by the file's dense matrices, if any.

A vector may be cut to its first ``dimensions`` values, if the model was trained for that
(Matryoshka representation learning, arXiv 2205.13147). It is then scaled to length 1, unless
``normalize`` is False. A file converted from a sentence-transformers folder may name a prompt,
which is prepended to each text, and a maximum text length (``models/sentence.py``). For a file that
names no pooling (llama.cpp's type 0) the mean is used, and ``Embedder.note`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from treadle.api.options import read_each
from treadle.base.validate import flag, listed, positive, token_ids
from treadle.errors import ContextFullError, NotFiniteError, TreadleError, UnsupportedError
from treadle.models.pooling_head import dense_of
from treadle.models.sentence import default_prompt as prompt_of
from treadle.models.sentence import max_seq_length

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.kvcache.prefix_tree import Lora

Floats = np.ndarray
Text = str | Sequence[int]
T = TypeVar("T")
EUCLIDEAN = 2  # divisors of a vector, by llama.cpp's numbers: the p of a p-norm,
LARGEST = 0  # its largest absolute value, which becomes 32760,
NOTHING = -1
NO_POOLING = "the file defines no pooling (pooling_type 0): vectors are the mean of all tokens"


class Embedder:
    """Computes embedding vectors of ``n`` values with fixed options. ``normalize``: scale vectors
    to length 1; ``dimensions``: keep so many values (``n``), None for all; ``lora``: the adapters
    to run with, None for the model's defaults; ``default_prompt``: prepend the file's prompt, if it
    has one, to each text.

    Raises TreadleError for invalid ``dimensions``, UnsupportedError for a prompt with control
    tokens.
    """

    def __init__(
        self,
        model: Model,
        normalize: bool = True,
        dimensions: int | None = None,
        lora: Lora | None = None,
        *,
        default_prompt: bool = True,
    ) -> None:
        normalize = flag("normalize", normalize)
        default_prompt = flag("default_prompt", default_prompt)
        self._dense = dense_of(model.engine.gguf, model.config.n_embd)
        width = len(self._dense[-1]) if self._dense else model.config.n_embd
        self._whole = dimensions is None or dimensions == width
        self._model = model
        self._normalize = normalize
        self._lora = lora
        self.n = width if dimensions is None else positive("dimensions", dimensions, width)
        self._limit = max_seq_length(model.gguf)
        self.note = NO_POOLING if model.config.pooling == "none" else ""
        self.prompt = prompt_of(model.gguf) if default_prompt else ""
        if self.prompt and any(isinstance(part, int) for part in model.tokenizer.cut(self.prompt)):
            raise UnsupportedError(
                f"{model.gguf.path}: the default prompt {self.prompt!r:.60} contains a control "
                "token, which text may not: use default_prompt=False"
            )

    def embed(self, texts: str | Sequence[Text], *, truncate: bool = False) -> Floats:
        """Return a vector of each text, float32 ``[n_texts, n]``; ``truncate``: cut texts that are
        too long. Raises the errors of ``read``.
        """
        return self.vectors(self.read(texts, truncate=truncate))

    def read(
        self,
        texts: str | Sequence[Text],
        name: Callable[[int], str] = "texts[{}]".format,
        *,
        truncate: bool = False,
    ) -> list[list[int]]:
        """Return the token ids of one or several texts, each a str or a list of ids. Raises
        TreadleError for a text without tokens, ContextFullError for one that is too long unless
        ``truncate`` (then it is cut). If there are several texts, the error names the text by
        ``name(index)``.
        """
        cut = flag("truncate", truncate)
        given = [texts] if isinstance(texts, str) else listed("texts", texts)
        return read_each(given, lambda text: self._read(text, cut), name)

    def cut(self, ids: list[int], n: int, *, whole: bool = True) -> list[int]:
        """Truncate ``ids`` to ``n``. If they are a ``whole`` text, and every text gets an end
        token, that stays as the last id.
        """
        ends = whole and (self._model.tokenizer.add_eos or self._model.tokenizer.add_sep)
        return [*ids[: n - 1], ids[-1]] if ends and len(ids) > n else ids[:n]

    def _read(self, text: Text, cut: bool) -> list[int]:
        if isinstance(text, str):
            ids = self._model._read(self.prompt + text)
        else:  # as given; required for a file without a vocabulary
            if not hasattr(text, "__iter__"):
                what = f"the text is {type(text).__name__}"
                raise TreadleError(f"{what}: expected a str, or a list of token ids")
            if not (ids := token_ids(text)):
                raise TreadleError("no tokens")
            self._model.engine.check_ids(ids)
        cache = self._model.engine.cache
        if cut:
            ids = self.cut(ids, min(cache.n_ctx, cache.n_tokens), whole=isinstance(text, str))
        if len(ids) > cache.n_ctx == self._limit:
            raise ContextFullError(
                f"{len(ids)} tokens do not fit the model's max_seq_length of {self._limit}: "
                "shorten the text, use truncate, or load the model with a larger context="
            )
        cache.check_context(len(ids))
        return ids

    def vectors(self, texts: Iterable[Sequence[int]]) -> Floats:
        """Return vectors, float32 ``[n_texts, n]``, for any number of tokenized texts, run in
        batches. Raises ContextFullError for a text that does not fit the context.
        """
        batches = self._model.engine.batches(texts)
        made = [np.zeros((0, self.n), np.float32), *(self.run(batch) for batch in batches)]
        return np.concatenate(made)

    def run(self, batch: Sequence[Sequence[int]]) -> Floats:
        """Return vectors, float32 ``[n_texts, n]``, for one batch of ``Engine.batches``. Running
        requests are preempted if there are too few pages.
        """
        *_, result = self.runs(batch)
        assert result is not None
        return result

    def runs(self, batch: Sequence[Sequence[int]]) -> Generator[Floats | None, None, None]:
        """Yield None after each engine run but the last, and at the end the batch's vectors,
        float32 ``[n_texts, n]``. A long text takes several runs; other threads may use the engine
        between them.
        """
        pooled = self._whole and not self._dense
        made = None
        each = self._model.engine.embed_runs(
            batch, unit=self._normalize and pooled, lora=self._lora
        )
        with closing(self._model._with_room(max(map(len, batch)), each)) as runs:
            for made in runs:
                if made is None:
                    yield None
        assert made is not None
        yield self._postprocess(made, pooled)

    def token_runs(self, ids: Sequence[int]) -> Generator[Floats | None, None, None]:
        """Yield None after each engine run but the last, and at the end the normed states of the
        tokens ``ids``, float32 ``[n_tokens, n_embd]``. Raises NotFiniteError.
        """
        engine = self._model.engine
        made = list[Floats]()
        each = engine.states_runs(ids, self._lora)
        with closing(self._model._with_room(len(ids), each)) as runs:
            for states in runs:
                made.append(states)
                if len(made) * engine.max_tokens < len(ids):
                    yield None
        yield _finite(np.concatenate(made))

    def _postprocess(self, made: Floats, pooled: bool) -> Floats:
        """Return vectors, f32 ``[n_texts, n]``, of pooled states ``made`` ``[n_texts, n_embd]``:
        multiplied by the dense matrices, cut and scaled. ``pooled``: the engine has already scaled
        them, and they are not scaled again. Raises NotFiniteError.
        """
        engine = self._model.engine
        for matrix in self._dense:  # row by row, results do not depend on the batch
            each = (matrix @ row for row in made)
            with np.errstate(over="ignore", invalid="ignore"):
                made = np.stack([*each]) if engine.deterministic else made @ matrix.T
        made = _finite(made[:, : self.n])
        return made if pooled or not self._normalize else scaled(made, EUCLIDEAN)


def _finite(vectors: Floats) -> Floats:
    """Return ``vectors`` as they are. Raises NotFiniteError for NaN and infinity."""
    if not np.isfinite(vectors).all():
        raise NotFiniteError(
            "the model's vectors are not finite numbers: its weights are damaged, or too large"
        )
    return vectors


def scaled(vectors: Floats, by: int) -> Floats:
    """Return ``vectors``, f32 ``[n_texts, n]``, each scaled as by llama.cpp's ``embd_normalize``.
    ``by``: NOTHING (unchanged), LARGEST (the largest absolute value becomes 32760), or a number p:
    the p-norm becomes 1. Rows of zeros stay.
    """
    x = np.abs(vectors.astype(np.float64))
    if by == NOTHING or not x.size:
        return vectors
    if by == LARGEST:
        size = x.max(1) / 32760.0
    else:  # relative to the largest value, so that powers stay in range
        top = np.maximum(x.max(1), np.finfo(np.float64).tiny)
        size = top * ((x / top[:, None]) ** by).sum(1) ** (1.0 / by)
    return np.asarray(vectors / np.where(size > 0.0, size, 1.0)[:, None], np.float32)
