"""Vectors of texts: the last layer's normed states, pooled as the file says (mostly their mean),
and multiplied by the matrices behind the pooling, where the file has some.

A vector may be cut to its first ``dimensions`` values, as models trained for it allow (Matryoshka
representation learning, arXiv 2205.13147), and is then made of length 1, unless ``normalize`` is
False. A file that came of a folder of sentence-transformers may name a prompt, which is put before
each text, and the longest text (``models/sentence.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from treadle.arguments import read_each
from treadle.errors import ContextFullError, TreadleError, UnsupportedError
from treadle.models.dense import dense_of
from treadle.models.sentence import default_prompt as prompt_of
from treadle.models.sentence import max_seq_length
from treadle.values import flag, listed, positive, token_ids

if TYPE_CHECKING:
    from treadle.engine import Engine
    from treadle.files.gguf import GGUF
    from treadle.kvtree import Lora
    from treadle.models.config import Config
    from treadle.text.tokenizer import Tokenizer

Floats = np.ndarray
Text = str | Sequence[int]
EUCLIDEAN = 2  # llama.cpp's numbers for what a vector is divided by: the p of a p-norm,
LARGEST = 0  # its largest value, which becomes 32760,
NOTHING = -1


class Model(Protocol):
    """What is asked of ``treadle.Model``."""

    config: Config
    engine: Engine
    gguf: GGUF

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's."""

    def _read(self, text: str) -> list[int]: ...

    def _make_room(self, n_tokens: int) -> None: ...


class Embedder:
    """Makes one kind of vectors. Raises TreadleError for ``dimensions`` that the model has not.
    ``lora``: the adapters that texts are read with, None for those of new texts.
    ``default_prompt``: whether the file's prompt, if it names one, goes before each text.
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
        self._model, self._normalize, self._lora = model, normalize, lora
        self.n = width if dimensions is None else positive("dimensions", dimensions, width)
        self._limit = max_seq_length(model.gguf)
        self.prompt = prompt_of(model.gguf) if default_prompt else ""
        if self.prompt and any(isinstance(part, int) for part in model.tokenizer.cut(self.prompt)):
            raise UnsupportedError(
                f"{model.gguf.path}: the default prompt {self.prompt!r:.60} spells a control "
                "token, which no text may: default_prompt=False leaves it out"
            )

    def of(self, texts: str | Sequence[Text]) -> Floats:
        """Float32 ``[n_texts, n]``; errors as ``read``'s."""
        return self.vectors(self.read(texts))

    def read(
        self, texts: str | Sequence[Text], name: Callable[[int], str] = "texts[{}]".format
    ) -> list[list[int]]:
        """The ids of a text, or of several, which may be ids. Raises TreadleError for one without
        tokens, ContextFullError for one that is too long; of several with its ``name``.
        """
        given = [texts] if isinstance(texts, str) else listed("texts", texts)
        return read_each(given, self._read, name)

    def _read(self, text: Text) -> list[int]:
        if isinstance(text, str):
            ids = self._model._read(self.prompt + text)
        else:  # as they are; the only texts of a file without a vocabulary
            if not hasattr(text, "__iter__"):
                what = f"the text is {type(text).__name__}"
                raise TreadleError(f"{what}: expected a str, or a list of token ids")
            if not (ids := token_ids(text)):
                raise TreadleError("no tokens")
            self._model.engine.check_ids(ids)
        cache = self._model.engine.cache
        if len(ids) > cache.n_ctx == self._limit:
            raise ContextFullError(
                f"{len(ids)} tokens do not fit the model's max_seq_length of {self._limit}: "
                "shorten the text, or load the model with a larger context="
            )
        cache.check_context(len(ids))
        return ids

    def vectors(self, texts: Iterable[Sequence[int]]) -> Floats:
        """Float32 ``[n_texts, n]`` of texts of any number, as ids. Raises ContextFullError."""
        batches = self._model.engine.together(texts)
        made = [np.zeros((0, self.n), np.float32), *(self.run(batch) for batch in batches)]
        return np.concatenate(made)

    def run(self, batch: Sequence[Sequence[int]]) -> Floats:
        """The same of texts of one run. Texts in hand give way where there is no room."""
        engine, pooled = self._model.engine, self._whole and not self._dense
        with engine.lock:
            self._model._make_room(max(map(len, batch)))
            made = engine.embed(batch, unit=self._normalize and pooled, lora=self._lora)
        for matrix in self._dense:  # of a row alone the bits are the same in every batch
            each = (matrix @ row for row in made)
            made = np.stack([*each]) if engine.deterministic else made @ matrix.T
        made = made[:, : self.n]
        return made if pooled or not self._normalize else scaled(made, EUCLIDEAN)


def scaled(vectors: Floats, by: int) -> Floats:
    """Rows divided as llama.cpp's ``embd_normalize`` says, float32; a row of zeros stays."""
    x = np.abs(vectors.astype(np.float64))
    if by == NOTHING or not x.size:
        return vectors
    if by == LARGEST:
        size = x.max(1) / 32760.0
    else:  # in units of the largest value: no power of it is out of range
        top = np.maximum(x.max(1), np.finfo(np.float64).tiny)
        size = top * ((x / top[:, None]) ** by).sum(1) ** (1.0 / by)
    return np.asarray(vectors / np.where(size > 0.0, size, 1.0)[:, None], np.float32)
