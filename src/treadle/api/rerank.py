"""Reranking: relevance scores of query-document pairs, by a model trained for it.

A cross-encoder processes both as one text, and its head turns the pooled state into a score:
``cls`` with tanh, then ``cls.output`` (BERT, RoBERTa); with GELU and a norm between (ModernBERT);
with ReLU or GELU (DistilBERT, ELECTRA); or ``cls.output`` alone, with one row, or with two for
"yes" and "no" (Qwen3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from treadle.api.options import read_each
from treadle.base.validate import flag
from treadle.engine.batch import NEVER
from treadle.errors import FileError, NotFiniteError, TreadleError, UnsupportedError
from treadle.files.metadata import MetadataReader
from treadle.models.sentence import HEAD_ACTIVATION, default_prompt

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.files.gguf import GGUF
    from treadle.kvcache.prefix_tree import Lora
    from treadle.models.config import Config

TEMPLATE = "tokenizer.chat_template.rerank"
# The prompt that Qwen3's rerankers were trained with, and their default instruction.
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
    "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
Floats = np.ndarray
Pair = tuple[list[int], int]  # ids, and the start of those with the second token type
T = TypeVar("T")


class Reranker:
    """Scores query-document pairs. ``lora``: the adapters to run with, None for the model's
    defaults. Raises UnsupportedError for a model that is not a reranker, FileError for tensors of
    wrong shapes.
    """

    def __init__(self, model: Model, lora: Lora | None = None) -> None:
        self._model = model
        self._lora = lora
        config = model.config
        self._causal = config.causal
        out = self._tensor("cls.output.weight")
        if out is None:
            lost = "the conversion dropped the pooler; load the safetensors folder instead"
            lost = lost if "cls.weight" in model.gguf.tensors else "no cls.output.weight"
            raise UnsupportedError(f"{model.path}: not a reranker: {lost}")
        if out.ndim != 2 or out.shape[1] != config.n_embd:
            self._fail("cls.output.weight", out, f"[1, {config.n_embd}]")
        if len(out) > 2 or (len(out) == 2 and not self._causal):
            what = f"cls.output.weight has {len(out)} rows: a classifier, not a reranker"
            raise UnsupportedError(f"{model.path}: {what}")
        self._out, self._bias = out, self._vector("cls.output.bias", len(out))
        self._cls, self._norm = self._tensor("cls.weight"), self._tensor("cls.norm.weight")
        if self._cls is not None and self._cls.shape != (config.n_embd,) * 2:
            self._fail("cls.weight", self._cls, f"[{config.n_embd}, {config.n_embd}]")
        if self._norm is not None and self._norm.shape != (config.n_embd,):
            self._fail("cls.norm.weight", self._norm, f"[{config.n_embd}]")
        self._cls_bias = self._vector("cls.bias", config.n_embd)
        self._norm_bias = self._vector("cls.norm.bias", config.n_embd)
        self._activate = _activation(model.gguf, config, normed=self._norm is not None)

    @property
    def gives_probabilities(self) -> bool:
        """Whether scores are probabilities (heads with two rows), else logits of any size."""
        return len(self._out) == 2

    def pair(self, query: str, document: str, most: int | None = None) -> Pair:
        """Return the ids of a pair as the model's input, and the index at which the second token
        type begins (NEVER without types). ``most``: maximum number of tokens, None for no limit.
        Texts are cut at their ends: each to half of that if both are longer, else only the longer
        one; of a decoder's prompt only the document.
        """
        tokenizer = self._model.tokenizer
        if self._causal:
            return self._cut_prompt(query, document, most), NEVER
        texts = (default_prompt(self._model.gguf) + query, document)
        first, second = (tokenizer.encode(text, bos=False) for text in texts)
        eos = [tokenizer.eos] if tokenizer.add_eos and tokenizer.eos is not None else []
        sep = [tokenizer.sep] if tokenizer.add_sep and tokenizer.sep is not None else []
        bos = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
        if most is not None:
            room = max(most - len([*bos, *eos, *sep, *(eos or sep)]), 0)
            n = max(min(len(first), room - len(second)), min(len(first), -(-room // 2)), 0)
            first = first[:n]
            second = second[: room - n]
        begin = [*bos, *first, *eos, *sep]
        return [*begin, *second, *(eos or sep)], len(begin) if tokenizer.tells_second else NEVER

    def _cut_prompt(self, query: str, document: str, most: int | None) -> list[int]:
        """Return the ids of a decoder's prompt for a query and a document, which is cut until the
        ids are at most ``most`` (None: not cut).
        """
        ids = self._prompt(query, document)
        tokenizer = self._model.tokenizer
        while most is not None and len(ids) > most and document:
            own = tokenizer.encode(document, bos=False)
            kept = tokenizer.decode(own[: max(len(own) - (len(ids) - most), 0)], start=False)
            document = kept if len(kept) < len(document) else document[:-1]
            ids = self._prompt(query, document)
        return ids

    def _prompt(self, query: str, document: str) -> list[int]:
        """Return the ids of a decoder's prompt for a query and a document, by the file's template
        or Qwen3's. The texts cannot spell control tokens.
        """
        tokenizer = self._model.tokenizer
        template = self._model.gguf.metadata.get(TEMPLATE, QWEN3)
        ids: list[int] = []
        for part in tokenizer.cut(str(template)):
            if isinstance(part, int):
                ids.append(part)
            else:  # "{document}" in the query is not replaced
                sides = (side.replace("{query}", query) for side in part.split("{document}"))
                ids += tokenizer.encode(document.join(sides), bos=False)
        return ids

    def scores(
        self,
        query: str,
        documents: Sequence[str],
        name: Callable[[int], str] = "documents[{}]".format,
        *,
        truncate: bool = False,
    ) -> Floats:
        """Return a score of each document for ``query``, float32 ``[n_documents]``; larger is
        better. Raises ContextFullError for a pair that is too long, unless ``truncate`` (then it is
        cut). If there are several documents, the error names the document by ``name(index)``.
        """
        if not isinstance(query, str):
            raise TreadleError(f"query is {type(query).__name__}: expected a str")
        cut = flag("truncate", truncate)

        def read(document: str) -> Pair:
            if not isinstance(document, str):
                raise TreadleError(f"the document is {type(document).__name__}: expected a str")
            cache = self._model.engine.cache
            pair = self.pair(query, document, min(cache.n_ctx, cache.n_tokens) if cut else None)
            cache.check_context(len(pair[0]))
            return pair

        pairs = read_each(documents, read, name)
        made = [np.zeros(0, np.float32), *(self.run(batch) for batch in self.batches(pairs))]
        return np.concatenate(made)

    def batches(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """Yield ``pairs``, in order, in batches that ``run`` can take."""
        at = 0
        for batch in self._model.engine.batches([ids for ids, _ in pairs]):
            yield list(pairs[at : at + len(batch)])
            at += len(batch)

    def run(self, pairs: Sequence[Pair]) -> Floats:
        """Return the scores of one batch, float32 ``[n_pairs]``. Running requests are preempted if
        there are too few pages.
        """
        *_, result = self.runs(pairs)
        assert result is not None
        return result

    def runs(self, pairs: Sequence[Pair]) -> Generator[Floats | None, None, None]:
        """Yield None after each engine run but the last, and at the end the batch's scores, float32
        ``[n_pairs]``. A long pair takes several runs. Raises NotFiniteError.
        """
        texts = [ids for ids, _ in pairs]
        seconds = [second for _, second in pairs]
        each = self._model.engine.embed_runs(texts, seconds, unit=False, lora=self._lora)
        pooled = None
        with closing(self._model._with_room(max(map(len, texts)), each)) as runs:
            for pooled in runs:
                if pooled is None:
                    yield None
        assert pooled is not None
        with np.errstate(over="ignore", invalid="ignore"):
            made = self.head(pooled)
        if not np.isfinite(pooled).all() or not np.isfinite(made).all():
            raise NotFiniteError(
                "the model's scores are not finite numbers: its weights are damaged, or too large"
            )
        yield made

    def head(self, x: Floats) -> Floats:
        """Return scores, float32 ``[n]``, of pooled states ``x``, float32 ``[n, n_embd]``. A head
        with two rows gives the probability of the first.
        """
        if self._cls is not None:
            x = x @ self._cls.T + self._cls_bias
            x = self._activate(x)
            x = x if self._norm is None else self._normed(x)
        logits: Floats = x @ self._out.T + self._bias
        if len(self._out) == 1:
            return np.asarray(logits[:, 0])
        return np.asarray(1.0 / (1.0 + np.exp(logits[:, 1] - logits[:, 0])), np.float32)

    def _normed(self, x: Floats) -> Floats:
        centred = x - x.mean(1, keepdims=True)
        scale = np.sqrt((centred**2).mean(1, keepdims=True) + self._model.config.norm_eps)
        return np.asarray(centred / scale * self._norm + self._norm_bias, np.float32)

    def _tensor(self, name: str) -> Floats | None:
        tensor = self._model.gguf.tensors.get(name)
        return None if tensor is None else tensor.dequantize()

    def _vector(self, name: str, n: int) -> Any:
        """Return the tensor ``name`` as float32 ``[n]``, or 0 if the file has none. Raises
        FileError for another shape.
        """
        found = self._tensor(name)
        if found is not None and found.shape != (n,):
            self._fail(name, found, f"[{n}]")
        return 0.0 if found is None else found

    def _fail(self, name: str, found: Floats, expected: str) -> None:
        what = f"shape {list(found.shape)}"
        raise FileError(what, path=self._model.path, where=name, expected=expected)


def _activation(gguf: GGUF, config: Config, *, normed: bool) -> Callable[[Floats], Floats]:
    """Return the activation between the two matrices of the file's head: the one that the file
    names, else GELU if the head has a norm (``normed``), tanh without. A model with learned
    positions and no token types is DistilBERT, whose activation is ReLU.
    """
    usual = "gelu_erf" if normed else "tanh"
    if config.n_positions and not config.n_types:
        usual = "relu"
    keys = MetadataReader(gguf.metadata, gguf.path)
    name = keys.text(HEAD_ACTIVATION, usual)
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        keys.refuse(HEAD_ACTIVATION, f"is {name!r:.60}: expected one of {known}")
    return _ACTIVATIONS[name]


def _gelu(x: Floats) -> Floats:
    erf = np.array([math.erf(v) for v in (x / math.sqrt(2.0)).ravel().tolist()], np.float32)
    return np.asarray(0.5 * x * (1.0 + erf.reshape(x.shape)), np.float32)


def _relu(x: Floats) -> Floats:
    return np.asarray(np.maximum(x, 0.0), np.float32)


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "tanh": np.tanh,
    "relu": _relu,
    "gelu_erf": _gelu,
}
