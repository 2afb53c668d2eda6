"""``TreadleLM``: requests of lm-eval, scored and answered as its ``hf`` model does.

Text is tokenized, split and cut as ``lm_eval.models.huggingface`` does it, so that scores differ by
the rounding of the model's arithmetic alone.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

import treadle

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

AUTO_BATCH = 8  # texts that are written together with batch_size=auto
MORE_LOGITS = 16  # tokens whose logits cost less than a run of their own
# Fields of ``treadle.Sampling`` by their names in transformers. All that are not given are off:
# what a model's file recommends is no part of a benchmark.
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "seed": "seed",
}
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_last_n": -1}
Pair = tuple[tuple[str, str], list[int], list[int]]  # texts, ids of context and of continuation


class TreadleLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model of treadle. ``path``: what ``treadle.load`` opens; ``pretrained`` is the same.

    ``batch_size``: how many texts ``generate_until`` writes together, "auto" for 8; ``max_length``:
    tokens of the context, None for the model's own up to 4096; ``max_gen_toks``: most tokens of an
    answer where a task does not say it; ``add_bos_token``: None as the file says;
    ``prefix_token_id``: the token before a text without context, None for BOS, else EOS;
    ``think_end_token``: a text; what an answer has up to it is dropped; ``device``: ignored, as
    lm-eval gives "cuda:0" to every model; ``treadle_device``: the ``device`` of ``treadle.load``;
    ``options``: its others, such as ``reasoning="off"`` or ``deterministic=True``.

    Raises the errors of ``treadle.load``.
    """

    backend = "causal"
    tokenizer = None  # transformers'; TemplateLM then leaves chats to us

    def __init__(
        self,
        path: str | None = None,
        *,
        pretrained: str | None = None,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        device: str | None = None,
        treadle_device: str = "cpu",
        **options: Any,
    ) -> None:
        super().__init__()
        if path is not None and pretrained is not None:
            raise treadle.TreadleError("path and pretrained are the same: give one of them")
        self.batch_size = self._read_batch_size(batch_size, max_batch_size)
        options = {"context": max_length, "n_sequences": self.batch_size, **options}
        options["device"] = treadle_device
        self.model = treadle.load(pretrained if path is None else path, **options)
        self.max_length = self.model.n_ctx
        self.max_gen_toks = max_gen_toks
        self._add_bos = add_bos_token
        self._prefix = prefix_token_id
        self._think_end = think_end_token

    @staticmethod
    def _read_batch_size(given: int | str | None, most: int | None) -> int:
        """Return the number of texts that are written together. Raises TreadleError."""
        text = str(1 if given is None else given)
        if text.startswith("auto"):
            return AUTO_BATCH if most is None else min(most, AUTO_BATCH)
        if not text.isdecimal() or int(text) < 1:
            raise treadle.TreadleError(
                f"batch_size is {given!r}: expected a positive whole number or auto"
            )
        return int(text)

    # -- tokens ---------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token at the end of a text. Raises UnsupportedError without one."""
        tokenizer = self.model.tokenizer
        found = tokenizer.eos if tokenizer.eos is not None else tokenizer.eot
        if found is None:
            raise treadle.UnsupportedError(
                f"{self.model.path}: the vocabulary has neither BOS nor EOS: give prefix_token_id="
            )
        return int(found)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context: BOS, else EOS."""
        if self._prefix is not None:
            return self._prefix
        bos = self.model.tokenizer.bos
        return self.eot_token_id if bos is None else int(bos)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text. One that begins with the text of BOS gets no second BOS."""
        tokenizer = self.model.tokenizer
        bos = self._add_bos if add_special_tokens is None else add_special_tokens
        spelt = tokenizer.bos is not None and string.startswith(tokenizer.piece(tokenizer.bos))
        if add_special_tokens is None and spelt:
            bos = False
        return self.model.tokenize(string, bos=bos) if string else []

    # -- log-likelihoods --------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: list[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return for each pair the log-probability of the continuation, and whether each of its
        tokens is the likeliest.

        Pairs are scored in the order of their tokens: contexts that begin alike are read once.
        """
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: requests[i][1] + requests[i][2])
        with self._session() as session:
            for i in tqdm(order, disable=disable_tqdm, desc="Running loglikelihood requests"):
                texts, context, continuation = requests[i]
                results[i] = self._score(session, context, continuation)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, results[i])
        return results

    @contextmanager
    def _session(self) -> Iterator[treadle.Session]:
        """Yield a session with room for a whole context."""
        with self.model.session() as session:
            yield session

    def _score(
        self, session: treadle.Session, context: list[int], continuation: list[int]
    ) -> tuple[float, bool]:
        """Return the log-probability of one continuation, and whether it is greedy."""
        if not continuation:
            return 0.0, True
        if len(continuation) > self.max_length:
            raise treadle.ContextFullError(
                f"a continuation has {len(continuation)} tokens, the context {self.max_length}: "
                "give a larger max_length"
            )
        ids = (context + continuation)[-(self.max_length + 1) : -1]
        first = len(ids) - len(continuation)  # its logits are those of the first token
        held = session.match(ids[: first + 1])
        if first - held > MORE_LOGITS:
            session.feed(ids[held:first])
            held = first
        rows = session.logits(ids[held:])[first - held :].astype(np.float64)
        targets = np.asarray(continuation)
        peaks = rows.max(axis=1)
        scores = rows[np.arange(len(rows)), targets] - peaks
        total = (scores - np.log(np.exp(rows - peaks[:, None]).sum(axis=1))).sum()
        return float(total), bool((rows.argmax(axis=1) == targets).all())

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text: of all its tokens, in windows as long as the
        context.
        """
        results = []
        with self._session() as session:
            for request in tqdm(requests, disable=disable_tqdm, desc="Running rolling requests"):
                (text,) = request.args
                windows = get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
                pairs = map(make_disjoint_window, windows)
                total = sum(self._score(session, *pair)[0] for pair in pairs)
                results.append(total)
                self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return results

    # -- texts ------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt, up to the first of its stop texts. Prompts with the
        same settings are written in shared batches.
        """
        groups = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(i)
        results = [""] * len(requests)
        with tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running generate_until requests"
        ) as bar:
            for places in groups.values():
                arguments = requests[places[0]].args[1]
                prompts = [requests[i].args[0] for i in places]
                for i, text in zip(places, self._generate(prompts, arguments), strict=True):
                    results[i] = text
                    self.cache_hook.add_partial("generate_until", requests[i].args, text)
                    bar.update()
        return results

    def _generate(self, prompts: Sequence[str], arguments: dict[str, Any]) -> Iterator[str]:
        """Yield the answer to each prompt; ``arguments`` are those of a task's generation_kwargs.
        Raises TreadleError for one that treadle lacks.
        """
        kwargs = dict(normalize_gen_kwargs(arguments, self.max_gen_toks))
        until = handle_stop_sequences(kwargs.pop("until", None), eos=None)
        n_tokens = kwargs.pop("max_gen_toks")
        room = self.max_length - n_tokens
        if room < 1:
            raise treadle.TreadleError(
                f"max_gen_toks is {n_tokens}: expected less than the context of {self.max_length}"
            )
        sampling = read_sampling(kwargs)
        # An end of reasoning is looked for in the whole answer, stop texts only behind it.
        stop = [] if self._think_end else [text for text in until if text]
        ids = (self.tok_encode(prompt)[-room:] for prompt in prompts)
        for made in self.model.generate_many(
            ids, max_tokens=n_tokens, stop=stop, sampling=sampling
        ):
            yield postprocess_generated_text(made.text, until, self._think_end)

    # -- chats ------------------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's caches of requests: that of the model's file."""
        return os.fspath(self.model.path).replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template, None if none is to be used. Raises TreadleError
        for a template's name: ``chat_template=`` of the model's arguments chooses one.
        """
        if isinstance(chat_template, str):
            raise treadle.TreadleError(
                f"apply_chat_template is {chat_template!r}: expected a flag; name the template in "
                "model_args: chat_template=..."
            )
        return str(self.model.template.source) if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a chat. A last message of the assistant is continued, without
        ``add_generation_prompt``.
        """
        return self.model.chat_prompt(chat_history)


def read_sampling(kwargs: dict[str, Any]) -> treadle.Sampling:
    """Return the sampling settings of normalized ``generation_kwargs``. Raises TreadleError for an
    unknown one.
    """
    given = dict(kwargs)
    sampled = given.pop("do_sample", False)
    for name in set(given) - set(SAMPLING):
        known = ", ".join(["until", "max_gen_toks", "do_sample", *SAMPLING])
        raise treadle.TreadleError(f"generation_kwargs: {name}: expected one of {known}")
    fields = {SAMPLING[name]: value for name, value in given.items() if value is not None}
    if not sampled:
        fields["temperature"] = 0.0
    return treadle.Sampling(**{**OFF, **fields})
