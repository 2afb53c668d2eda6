"""Decodes the text of windows, greedily, by sampling, or by beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.errors import NotFiniteError
from treadle.speech.repetition import repeated_length
from treadle.speech.settings import TranscribeSettings
from treadle.speech.token_rules import (
    TimestampRules,
    largest_places,
    log_softmax,
    log_sums,
)
from treadle.speech.window_text import WindowText, best_text

if TYPE_CHECKING:
    from treadle.speech.model import DecoderBatch, EncodedWindow, SpeechModel

CHECK_EVERY = 8  # ids between two checks for repetitions
MOST_ROWS = 40  # of one batch: the default ``max_rows`` of a model


@dataclass
class TextRow:
    """A text while it is being decoded.

    window: index of its window in the batch.
    ids, logprobs: the ids after the prompt, and the log-probability of each.
    total: sum of the log-probabilities of all ``n_decoded`` ids, those cut as repetitions included,
        and of the end token.
    loops: whether the text was cut because its end repeats itself.
    """

    window: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total: float = 0.0
    n_decoded: int = 0
    loops: bool = False

    def grown(self, id: int, logprob: float) -> TextRow:
        """Return a copy of the row with one more id, whose log-probability is ``logprob``."""
        ids = [*self.ids, id]
        logprobs = [*self.logprobs, logprob]
        return TextRow(self.window, ids, logprobs, self.total + logprob, self.n_decoded + 1)


class WindowDecoder:
    """Decodes the text of encoded windows. The prompts that its methods take are complete: the
    earlier text, if any, ``sot``, and the ids of language and task.
    """

    def __init__(self, model: SpeechModel, settings: TranscribeSettings) -> None:
        self._model = model
        self._config = model.config
        self.eot = model.config.special.eot
        self._settings = settings
        self._rules = TimestampRules(model.config, timestamps=settings.timestamps)
        self._n_each = max(settings.best_of, settings.beams)
        self._random = np.random.default_rng(settings.seed)

    def best(
        self, windows: Sequence[EncodedWindow], prompts: Sequence[Sequence[int]]
    ) -> list[WindowText]:
        """Return the text of each window: that of the first of the settings' temperatures that
        gives an acceptable one (``WindowText.is_good``), else the best of all attempts.
        """
        attempts: list[list[WindowText]] = [[] for _ in windows]
        left = list(range(len(windows)))
        for temperature in self._settings.temperatures:
            # A window has one row at temperature 0, several with beams or samples.
            is_single = temperature == 0 and self._settings.beams == 1
            n_together = MOST_ROWS // (1 if is_single else self._n_each)
            for at in range(0, len(left), n_together):
                some = left[at : at + n_together]
                texts = self.decode(
                    [windows[i] for i in some], [prompts[i] for i in some], temperature
                )
                for i, text in zip(some, texts, strict=True):
                    attempts[i].append(text)
            left = [i for i in left if not attempts[i][-1].is_good(self._settings)]
            if not left:
                break
        return [
            each[-1] if each[-1].is_good(self._settings) else best_text(each, self._settings)
            for each in attempts
        ]

    def decode(
        self,
        windows: Sequence[EncodedWindow],
        prompts: Sequence[Sequence[int]],
        temperature: float,
    ) -> list[WindowText]:
        """Return the text of each window, decoded once at one temperature; ``prompts``: one for
        each window. Raises NotFiniteError for logits that are not finite.
        """
        with self._model.decoder(windows) as batch:
            logits, no_speech = self._begin(batch, prompts)
            most = [self._most_ids(prompt) for prompt in prompts]
            if temperature == 0 and self._settings.beams > 1:
                rows = _BeamSearch(self, batch, most, self._settings.beams).run(logits)
            else:
                rows = self._sampled(batch, logits, most, temperature)
        return [
            self._finished([row for row in rows if row.window == i], temperature, no_speech[i])
            for i in range(len(windows))
        ]

    def _begin(
        self, batch: DecoderBatch, prompts: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray, list[float]]:
        """Run the prompts; return the logits after them, f32 ``[n_windows, n_vocab]``, and for each
        window the probability of the no-speech token after ``sot`` (0.0 if the vocabulary has no
        such token).
        """
        special = self._config.special
        sot = special.sot
        places = [len(prompt) - 1 - [*reversed(prompt)].index(sot) for prompt in prompts]
        first, last = batch.logits_at(prompts, places)
        check_finite(first)
        no_speech = [0.0] * len(prompts)
        if special.no_speech >= 0:  # the vocabulary has it
            no_speech = np.exp(log_softmax(first)[:, special.no_speech]).tolist()
        return last, no_speech

    def _most_ids(self, prompt: Sequence[int]) -> int:
        """Return the most ids that a text after this prompt may have: half of the context, as in
        training, or what is left of it.
        """
        n_ctx = self._config.n_text_ctx
        return max(0, min(n_ctx // 2, n_ctx - len(prompt)))

    def _sampled(
        self, batch: DecoderBatch, logits: np.ndarray, most: list[int], temperature: float
    ) -> list[TextRow]:
        """Decode by sampling; return the finished rows: ``best_of`` for each window, or at
        temperature 0 a single one, decoded greedily. ``logits``: those after the prompts, one row
        for each window; ``most``: the most ids of each window's text.
        """
        n_each = self._settings.best_of if temperature > 0 else 1
        live = [TextRow(i) for i in range(len(most)) for _ in range(n_each)]
        if n_each > 1:
            sources = [row.window for row in live]
            batch.select(sources)
            logits = logits[sources]
        done: list[TextRow] = []
        while live:
            sums = self.ruled(logits, live)
            ids = self._chosen(logits, temperature)
            logprobs = logits[range(len(live)), ids] - sums
            kept: list[int] = []
            for i, (row, id) in enumerate(zip(live, ids, strict=True)):
                row.total += float(logprobs[i])
                if id == self.eot:
                    continue
                row.n_decoded += 1
                row.ids.append(id)
                row.logprobs.append(float(logprobs[i]))
                if not self.ends(row, most[row.window]):
                    kept.append(i)
            done += [row for i, row in enumerate(live) if i not in kept]
            if kept and len(kept) < len(live):
                batch.select(kept)
            live = [live[i] for i in kept]
            if live:
                logits = batch.step([row.ids[-1:] for row in live])
        return done

    def ruled(self, logits: np.ndarray, rows: Sequence[TextRow]) -> np.ndarray:
        """Set the logits of forbidden tokens to -inf, in place; return the ``log_sums`` of the
        logits that are left, f32 ``[n_rows]``. ``logits``: f32 ``[n_rows, n_vocab]``, those after
        the texts ``rows``. Raises NotFiniteError for logits that are not finite.
        """
        check_finite(logits)
        self._rules.apply(logits, [row.ids for row in rows])
        return log_sums(logits)

    def ends(self, row: TextRow, most: int) -> bool:
        """Return whether a row must end without an end token: it has ``most`` ids, or its end
        repeats itself. In the latter case the repetitions after the first are removed from it, and
        ``row.loops`` is set.
        """
        if len(row.ids) % CHECK_EVERY == 0:
            places = [i for i, id in enumerate(row.ids) if id < self.eot]
            n_repeated = repeated_length([row.ids[i] for i in places])
            if n_repeated:
                row.loops = True
                end = places[-n_repeated]
                del row.ids[end:]
                del row.logprobs[end:]
        return row.loops or len(row.ids) >= most

    def _chosen(self, logits: np.ndarray, temperature: float) -> list[int]:
        if temperature == 0:
            return [int(id) for id in logits.argmax(axis=1)]
        # Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample.
        noise = self._random.gumbel(size=logits.shape)
        return [int(id) for id in (logits / temperature + noise).argmax(axis=1)]

    def _finished(self, rows: list[TextRow], temperature: float, no_speech: float) -> WindowText:
        """Return the best of a window's finished rows as a ``WindowText``. ``no_speech``: the
        probability of the no-speech token in that window.
        """
        texts = [
            WindowText(
                ids=tuple(row.ids),
                logprobs=tuple(row.logprobs),
                mean_logprob=row.total / (row.n_decoded + 1),
                temperature=temperature,
                no_speech=no_speech,
                text=self._model.tokenizer.decode(self.words_of(row.ids), start=False).strip(),
                loops=row.loops,
            )
            for row in rows
        ]
        return best_text(texts, self._settings)

    def words_of(self, ids: Sequence[int]) -> list[int]:
        """Return those of ``ids`` that are text, without timestamps and other special tokens."""
        return [id for id in ids if id < self.eot]


class _BeamSearch:
    """Beam search over several windows in one batch. A window is done when it has as many finished
    texts as beams. ``most``: the most ids of each window's text.
    """

    def __init__(
        self, decoder: WindowDecoder, batch: DecoderBatch, most: list[int], n_beams: int
    ) -> None:
        self._decoder = decoder
        self._batch = batch
        self._most = most
        self._beams = n_beams
        self._done: list[list[TextRow]] = [[] for _ in most]

    def run(self, logits: np.ndarray) -> list[TextRow]:
        """Return the finished rows of all windows. ``logits``: those after the prompts, one row for
        each window.
        """
        live = [TextRow(i) for i in range(len(self._most))]
        while live:
            sums = self._decoder.ruled(logits, live)
            ids = largest_places(logits, self._beams + 1)  # one of them may be the end token
            logprobs = np.take_along_axis(logits, ids, 1) - sums[:, None]
            most = [
                [*zip(*each, strict=True)]
                for each in zip(ids.tolist(), logprobs.tolist(), strict=True)
            ]
            grown: list[TextRow] = []
            sources: list[int] = []
            for window in dict.fromkeys(row.window for row in live):
                places = [i for i, row in enumerate(live) if row.window == window]
                for row, source in self._step(window, places, live, most):
                    grown.append(row)
                    sources.append(source)
            live = grown
            if live:
                self._batch.select(sources)
                logits = self._batch.step([row.ids[-1:] for row in live])
        return [row for rows in self._done for row in rows]

    def _step(
        self,
        window: int,
        places: list[int],
        live: list[TextRow],
        most: Sequence[Sequence[tuple[int, float]]],
    ) -> list[tuple[TextRow, int]]:
        """Return a window's next beams, each with the index in ``live`` of the row that it
        continues; [] if the window is done. ``live``: the unfinished rows of all windows;
        ``places``: indices of this window's rows among them; ``most``: the most probable next ids
        of each row of ``live``, with log-probabilities.
        """
        candidates = [
            (live[place].total + logprob, place, id, logprob)
            for place in places
            for id, logprob in most[place]
        ]
        candidates.sort(key=lambda each: -each[0])
        done = self._done[window]
        beams: list[tuple[TextRow, int]] = []
        for total, place, id, logprob in candidates:
            if total == -np.inf or len(beams) == self._beams:
                break
            row = live[place]
            if id == self._decoder.eot:
                done.append(TextRow(window, row.ids, row.logprobs, total, row.n_decoded))
                continue
            grown = row.grown(id, logprob)
            if self._decoder.ends(grown, self._most[window]):
                done.append(grown)
            else:
                beams.append((grown, place))
        return [] if len(done) >= self._beams else beams


def check_finite(logits: np.ndarray) -> None:
    """Raise NotFiniteError if any logit is NaN or infinite."""
    # A maximum is NaN if a value is; two passes are faster than an array of flags.
    ends = logits.max(initial=0.0), logits.min(initial=0.0)
    if not np.isfinite(ends).all():
        raise NotFiniteError(
            "the model's logits are not finite numbers: its weights are damaged, or too large"
        )
