"""Changes a sound's sample rate with a windowed sinc filter in polyphase form.

Source: J. O. Smith, "Digital Audio Resampling" (CCRMA, Stanford); the window and its length are J.
F. Kaiser's (1974). Frequencies up to 0.9 of the lower rate's Nyquist frequency pass unchanged (7.2
kHz at 16 kHz); those above it are 96 dB down, like the quantisation noise of 16 bits.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np

STOPBAND_DB = 96.0
PASSBAND = 0.9  # of the lower rate's Nyquist frequency
_BETA = 0.1102 * (STOPBAND_DB - 8.7)  # Kaiser's window for this attenuation
_ALPHA = (STOPBAND_DB - 7.95) / 14.36  # Kaiser's filter length times its transition width
MAX_PHASES = 1000  # above, filters of a whole period would not fit into a cache
_OUTPUTS = 128  # least outputs of one matrix product
_BLOCK = 4096  # outputs of one gathered block
_PART = 1 << 20  # inputs filtered at a time


def resample(samples: np.ndarray, rate: int, to_rate: int) -> np.ndarray:
    """Convert samples, float32 ``[n]`` at ``rate``, to float32 ``[round(n * to_rate / rate)]`` at
    ``to_rate`` (both in Hz).
    """
    resampler = Resampler(rate, to_rate)
    parts = [
        resampler.push(samples[begin : begin + _PART]) for begin in range(0, len(samples), _PART)
    ]
    return np.concatenate([*parts, resampler.finish()])


class Resampler:
    """Changes the sample rate of a sound that arrives in parts; the parts' sizes do not affect the
    result.

    Output ``n`` is at input time ``n * rate / to_rate``: a weighted sum of the inputs within half a
    filter, with silence before the first and after the last. A constant signal is unchanged.
    """

    def __init__(self, rate: int, to_rate: int) -> None:
        step = Fraction(rate, to_rate)
        self._step = step
        self._phases = step.denominator  # outputs n and n + phases have the same filter
        self._stride = step.numerator  # inputs between them
        slower = min(1.0, to_rate / rate)
        # in cycles per input: the transition's middle and width
        self._cutoff = slower * (1 + PASSBAND) / 4
        width = slower * (1 - PASSBAND) / 2
        self._half = ceil(_ALPHA / width / 2)  # inputs on each side
        self._inputs = np.zeros(self._half - 1, np.float32)  # inputs that are still needed
        self._first = 1 - self._half  # index of the first of ``_inputs``
        self._n_in = 0
        self._n_out = 0
        self._table: np.ndarray | None = None  # filter weights, computed at first use

    def push(self, samples: np.ndarray) -> np.ndarray:
        """Add samples, float32 ``[n]``; return the outputs that are now complete,
        float32 ``[m]``.
        """
        if self._stride == self._phases:
            return samples
        self._n_in += len(samples)
        self._inputs = np.concatenate([self._inputs, samples])
        # Output n reads inputs floor(n * step) - half + 1 to floor(n * step) + half.
        ready = -((self._half - self._n_in) * self._phases // self._stride)
        return self._outputs(ready)

    def finish(self) -> np.ndarray:
        """Return the outputs that remain after the last ``push``, float32 ``[m]``."""
        if self._stride == self._phases:
            return np.zeros(0, np.float32)
        total = (2 * self._n_in * self._phases + self._stride) // (2 * self._stride)
        silence = np.zeros(self._half + self._stride // self._phases + 1, np.float32)
        self._inputs = np.concatenate([self._inputs, silence])
        return self._outputs(total)

    def _outputs(self, end: int) -> np.ndarray:
        """Return the next outputs, up to number ``end`` (exclusive), float32 ``[m]``, and drop the
        inputs that no later output reads.
        """
        if end <= self._n_out:
            return np.zeros(0, np.float32)
        out = self._by_periods(end) if self._phases <= MAX_PHASES else self._by_gathering(end)
        self._n_out = end
        needed = self._begin(end - end % self._phases) - self._first
        self._inputs = self._inputs[needed:].copy()
        self._first += needed
        return out

    def _begin(self, n: int) -> int:
        """Return the index of the first input that output ``n`` reads."""
        return n * self._stride // self._phases - self._half + 1

    def _by_periods(self, end: int) -> np.ndarray:
        """Return the next outputs, up to number ``end`` (exclusive), as one matrix product: each
        row of inputs gives whole periods of outputs, after which the filters repeat.
        """
        n_periods = ceil(_OUTPUTS / self._phases)
        n_outputs = n_periods * self._phases
        n_inputs = n_periods * self._stride
        if self._table is None:
            last = self._begin(n_outputs - 1) - self._begin(0)
            indices = np.arange(last + 2 * self._half)[:, None] + self._begin(0)
            times = np.arange(n_outputs) * self._stride / self._phases
            self._table = self._filters(indices - times, axis=0)
        begin = self._n_out - self._n_out % self._phases
        n_rows = ceil((end - begin) / n_outputs)
        n_read = (n_rows - 1) * n_inputs + len(self._table)
        inputs = self._inputs[self._begin(begin) - self._first :]
        missing = n_read - len(inputs)  # with weight 0 in all outputs before ``end``
        if missing > 0:
            inputs = np.concatenate([inputs, np.zeros(missing, np.float32)])
        rows = np.lib.stride_tricks.sliding_window_view(inputs[:n_read], len(self._table))
        # BLAS cannot read overlapping rows.
        out: np.ndarray = np.ascontiguousarray(rows[::n_inputs]) @ self._table
        return out.reshape(-1)[self._n_out - begin : end - begin]

    def _by_gathering(self, end: int) -> np.ndarray:
        """Return the next outputs, up to number ``end`` (exclusive), each as the sum of its inputs
        times its filter: for rates with more than MAX_PHASES different filters.
        """
        if self._table is None:
            phases = np.arange(self._phases)
            fractions = phases * self._stride % self._phases / self._phases
            indices = np.arange(1 - self._half, self._half + 1)
            self._table = self._filters(indices - fractions[:, None], axis=1)
        rows = np.lib.stride_tricks.sliding_window_view(self._inputs, 2 * self._half)
        parts = []
        for first in range(self._n_out, end, _BLOCK):
            n = np.arange(first, min(first + _BLOCK, end))
            inputs = rows[n * self._stride // self._phases - self._half + 1 - self._first]
            parts.append(np.einsum("ij,ij->i", inputs, self._table[n % self._phases]))
        return np.concatenate(parts)

    def _filters(self, offsets: np.ndarray, axis: int) -> np.ndarray:
        """Return the filter weights, float32 ``[a, b]``, at ``offsets`` ``[a, b]``: distances from
        the filter's middle, in inputs. The weights add up to 1 along ``axis``.
        """
        # Interpolation is 1e-7 of the window's height off; a Bessel function each is slow.
        at = np.linspace(0, 1, 8193)
        window = np.interp(
            np.abs(offsets) / self._half, at, np.i0(_BETA * np.sqrt(1 - at**2)), right=0
        )
        values = np.sinc(2 * self._cutoff * offsets) * window
        scaled: np.ndarray = values / values.sum(axis, keepdims=True)
        return scaled.astype(np.float32)
