"""Cache pools: per-sequence memory of a model's layers that persists between runs.

A graph describes its pools; ``kvcache/cache.py`` makes and fills them. A pool's index in the list
is its number everywhere: in a sequence's pages, in a run's inputs, in kernels' specs.
"""

from __future__ import annotations

from treadle.base.fast_dataclass import dataclass


@dataclass(frozen=True)
class PoolSpec:
    """Pages of keys and values for layers of one shape; sizes in elements, positions in tokens.

    name: used in messages, and for the pool's constant in plans.
    layers: numbers of the layers that write to the pool; each page has a part for each of them, in
        this order. Layers that read another layer's keys and values are not listed.
    n_head_kv, head_dim, head_dim_v: number of key/value heads, and the dims of their keys and
        values.
    window: attention window in tokens, the current one included; 0: unlimited.
    chunked: the window starts at the last multiple of ``window`` (chunked attention).
    causal: tokens do not attend to later ones. Otherwise all tokens of an input are in one run.
    latent: a value is the first dims of its key, and is not stored separately.
    index: the keys are an indexer's; the layers have another pool for keys and values.
    unit: above 0, a page has one row per ``unit`` tokens, written with the last of them, and no
        values. 0: each token has a key, stored transposed, and a value.
    n_keys: most keys of an encoder's rows (cross attention). They are stored before a sequence's
        first token, and several sequences may attend to them. 0: each token stores its own key.
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
    index: bool = False
    n_keys: int = 0
    unit: int = 0


@dataclass(frozen=True)
class StateSpec:
    """A state of fixed size for each sequence and layer: ``n_values`` f32, zero at position 0.

    name: used in messages, and for the pool's constant in plans.
    layers: layers that have such a state, in ascending order.
    beside: it belongs to another part of the layer than its mixer (such as the FFN); the mixer may
        have a state in another pool.
    """

    name: str
    layers: tuple[int, ...]
    n_values: int
    beside: bool = False
