"""Logits in, one token id out: llama.cpp's sampler chain, and room for one's own samplers.

::

    settings.py     Sampling: every knob, its default and its range
    candidates.py   Candidates (the tokens still in play), the k largest, softmax
    truncation.py   top-n-sigma, top-k, typical, top-p, min-p, XTC, infill: which tokens stay
    temperature.py  temperature, fixed or steered by entropy
    repetition.py   repeat, frequency and presence penalties; DRY and its sequence breakers
    selection.py    the token: greedy, a draw, mirostat 1 and 2, adaptive-p; random numbers
    recommended.py  what a model's files recommend
    chain.py        Sampler: the order, and what one sequence must remember

Logits are float32, probabilities float64: with the same logits and seed, two machines part only
where a random number falls within a rounding error (1e-15) of a boundary.
"""

from treadle.sampling.candidates import Candidates
from treadle.sampling.chain import Sampler, TokenConstraint
from treadle.sampling.recommended import recommended
from treadle.sampling.settings import DEFAULT_ORDER, CustomSampler, Sampling

__all__ = [
    "DEFAULT_ORDER",
    "Candidates",
    "CustomSampler",
    "Sampler",
    "Sampling",
    "TokenConstraint",
    "recommended",
]
