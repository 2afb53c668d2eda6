"""Sampling: llama.cpp's sampler chain from logits to a token id, plus custom samplers.

::

    settings.py     Sampling: every setting, its default and range; what a model's files recommend
    candidates.py   Candidates (the remaining tokens), the k largest, softmax, temperature
    truncation.py   top-n-sigma, top-k, typical, top-p, min-p, XTC, infill: which tokens stay
    repetition.py   repeat, frequency and presence penalties; DRY and its sequence breakers
    selection.py    token selection: greedy, random, mirostat 1 and 2, adaptive-p; random numbers
    chain.py        Sampler: the order of the stages, and the state of one sequence
    best.py         the first stages on the largest logits of a row, where these decide
    logprobs.py     log-probabilities of output tokens and of their alternatives

Logits are float32, probabilities float64: with the same logits and seed, two machines differ only
if a random number falls within a rounding error (1e-15) of a boundary.
"""

from treadle.sampling.candidates import Candidates
from treadle.sampling.chain import Sampler, TokenConstraint
from treadle.sampling.settings import DEFAULT_ORDER, CustomSampler, Sampling, recommended

__all__ = [
    "DEFAULT_ORDER",
    "Candidates",
    "CustomSampler",
    "Sampler",
    "Sampling",
    "TokenConstraint",
    "recommended",
]
