"""Pools: what a model's layers remember of a sequence from one run to the next.

A graph describes its pools; ``kvcache/cache.py`` makes and fills them. A pool's place in the list
is its index everywhere: in a sequence's pages, in a run's inputs, in kernels' specs.
"""

from __future__ import annotations

from treadle.base.fast_dataclass import dataclass


@dataclass(frozen=True)
class PoolSpec:
    """Pages of keys and values for layers that are alike; sizes in elements, positions in tokens.

    name: in messages, and of the pool's constant in plans.
    layers: which layers write to it, in the order of their parts of a page. A layer that reads
        another one's keys and values is not listed.
    window: tokens that its layers see, the current one included; 0: all of them.
    chunked: these are those from the last multiple of ``window`` on.
    causal: tokens see none behind them. Else a text's tokens are all in one run.
    latent: a value is its key's first dims, and is kept nowhere else.
    """

    name: str
    layers: tuple[int, ...]
    n_head_kv: int
    head_dim: int
    head_dim_v: int
    window: int
    causal: bool = True
    latent: bool = False
    chunked: bool = False


@dataclass(frozen=True)
class StateSpec:
    """A state of fixed size for each sequence and layer: ``n_values`` f32, zero at position 0."""

    name: str
    layers: tuple[int, ...]
    n_values: int
