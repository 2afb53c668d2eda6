"""Model configuration: hyper-parameters, and a record for each layer, rope table and cache pool.

A graph reads them from a file's keys and checks them; later code does not check again. Numbers are
in range, sizes divide, and every tensor that a layer names exists in its shape.

This module imports no graph: a start that finds the configuration stored (``stored_config.py``)
needs none. What a graph tells of a configuration is computed on first use and stored with it.

A cache pool is the per-sequence memory of layers that persists between runs. A graph describes its
pools; ``kvcache/cache.py`` makes and fills them. A pool's index in the list is its number
everywhere: in a sequence's pages, in a run's inputs, in kernels' specs.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

from treadle.base.fast_classes import cached_property, dataclass
from treadle.models.arch import Arch
from treadle.models.rope import Rope


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


USUAL_CONTEXT = 4096  # default context in tokens, if the model supports as many
N_BATCH = 512  # tokens of a prompt per run
# Tokens of a prompt per run with experts: a run unpacks each expert once for all its tokens.
N_BATCH_EXPERTS = 2048


@dataclass(frozen=True)
class Experts:
    """A layer's experts: their number and width, and how the router chooses and weighs them. Widths
    in values.
    """

    n: int
    n_used: int  # experts per token
    n_ff: int  # width of each
    n_ff_shared: int = 0  # total width of the shared experts; 0: none
    shared_fused: bool = False  # gate and up of the shared experts are one matrix
    gating: str = "softmax"  # of all scores; or "sigmoid" or "sqrt_softplus" of each
    norm: bool = False  # the weights of the chosen experts are normalised to sum to 1
    shared_mean: bool = False  # shared and chosen experts' results are averaged, not added
    scale: float = 1.0  # factor of the chosen experts' weights
    per_chunk: int = 1  # neighbours that share an additional small expert
    n_ff_chunk: int = 0  # width of the small experts; 0: none
    chunk_scale: float = 1.0  # factor of the small experts' weights
    jitter: float = 0.0  # of SparseMixer's choices, see kernels/moe/route.py; 0: plain top-k
    cap: float = 0.0  # softcap of scores: cap * tanh(score / cap); 0.0: off
    n_groups: int = 1  # groups of neighbours; a token's experts are from few groups
    n_groups_used: int = 1  # groups of a token: those with the best scores
    n_latent: int = 0  # width of the experts' input and output; 0: that of the hidden states
    activation: str = ""  # of the chosen experts; "": the architecture's
    by_token: bool = False  # a table has each token's experts; scores only weigh them
    n_shared: int = 0  # shared experts that the router scores beside the others


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a layer with a recurrent state of fixed size. A layer that is only a short
    convolution has no heads.
    """

    n_conv: int  # taps of its convolution
    n_channels: int  # channels of the convolution, which is depthwise
    n_head: int = 0  # heads, each with a state of ``head_dim * n_state`` numbers; 0: none
    head_dim: int = 0  # values of a head
    n_state: int = 0  # numbers in the state for each value of a head
    n_group: int = 1  # groups of heads that share keys and queries (B and C of Mamba)
    norm_eps: float = 0.0  # of the norm after its heads, or of those of Mamba-1's dt, B and C
    n_rank: int = 0  # rank of Mamba-1's dt
    ranks: tuple[int, ...] = ()  # of WKV-7's decays, rates, mixed values and gates; 0: no gates
    beta_most: float = 1.0  # largest beta of the delta rule: above 1, eigenvalues may be negative
    floor: float = 0.0  # least logarithm of a decay of Kimi Delta Attention; 0.0: none
    normed: bool = False  # Mamba-1's dt, B and C have norms without weights (Falcon)

    @property
    def n_inner(self) -> int:
        return self.n_head * self.head_dim

    @property
    def n_keys(self) -> int:
        return self.n_group * self.n_state

    @property
    def n_values(self) -> int:
        """Number of f32 values in the state: the convolution's last inputs, then each head's
        state.
        """
        return (self.n_conv - 1) * self.n_channels + self.n_inner * self.n_state


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention (MLA). A token caches one row that all heads share: ``n_kv_rank``
    dims, then ``n_rope`` rotated ones. The layer's ``head_dim`` is the sum of both.
    """

    n_q_rank: int  # low-rank values of which queries are made; 0: a single matrix makes queries
    n_kv_rank: int  # low-rank values of a token, of which keys and values are made
    n_nope: int  # dims of a head's query that are not rotated
    n_rope: int  # rotated dims, after those
    n_v: int  # dims of a head's value
    norm_eps: float  # of the norms of both ranks
    scale: float = 0.0  # of scores, if layers differ; 0.0: the model's

    @property
    def n_q(self) -> int:
        """Number of dims of a head's query: those that are not rotated, then the rotated ones."""
        return self.n_nope + self.n_rope

    @property
    def n_row(self) -> int:
        """Number of values that a token caches in each layer."""
        return self.n_kv_rank + self.n_rope


@dataclass(frozen=True)
class Indexer:
    """A layer's indexer: a small attention that chooses the keys that each query attends to."""

    n_head: int  # query heads; there is one key for all of them
    head_dim: int  # dims of its queries and keys
    top: int  # units of keys that a query sees
    rope: str  # pairs of its rotated dims, as ``Arch.rope``
    first: int = 0  # the first of its dims that turn
    norm_eps: float = 1e-6  # of the norm of its keys
    unit: int = 1  # consecutive keys that are chosen together
    local: int = 0  # last units, which a query sees always
    apart: bool = False  # each head chooses keys of its own, for a key head of attention
    pooled: bool = False  # a unit's key is the mean of its keys, and only whole units compete


@dataclass(frozen=True)
class RelativeBias:
    """Biases of attention scores by distance: for each head a token makes ``rank`` values, whose
    product with a matrix ``[rank, reach]`` is the bias of its query's score at each distance.
    """

    rank: int
    reach: int  # distances with a bias, the query's own token included


@dataclass(frozen=True)
class Hyper:
    """Sizes of hyper-connections: parallel streams of hidden states, which each half of a layer
    mixes.
    """

    n: int  # streams
    n_embd: int  # values of each
    n_rank: int = 0  # of the gates of the mix; 0: none (``streams/{independent,manifold}.py``)
    rounds: int = 0  # of Sinkhorn's normalisation of the weights between streams
    magnitude: float = 2.0  # largest weight of a stream when a result is added
    eps: float = 0.0  # added to weights, and to the sums of Sinkhorn's normalisation


@dataclass(frozen=True)
class Compressed:
    """Sizes of DeepSeek V4's attention: to rows of the last tokens, and to rows that each stand for
    a unit of earlier tokens.
    """

    n_q_rank: int  # low-rank values of which queries are made
    n_rope: int  # rotated dims, a head's last
    n_groups: int  # groups of heads; each group's result is multiplied by its own matrix
    n_o_rank: int  # rows of each of these matrices
    unit: int = 0  # tokens of a unit; 0: there are no units
    overlap: bool = False  # a unit's row is made of the tokens of the unit before as well


@dataclass(frozen=True)
class Ngrams:
    """N-gram embeddings, added in one layer: rows of a table, chosen by hashes of a token's last
    tokens.
    """

    n: int  # tokens of the longest n-gram
    heads: int  # rows for each length of n-grams, from 2 on
    n_row: int  # values of a row
    end: int  # the token behind which earlier ones do not count
    n_conv: int  # taps of a convolution, ``n`` tokens apart
    multipliers: tuple[int, ...]  # of the ids of the last ``n`` tokens, in the hash
    sizes: tuple[int, ...]  # number of table rows of each of the ``n_heads`` hashes
    offsets: tuple[int, ...]  # first table row of each of them
    n_rows: int  # of the table

    @property
    def n_heads(self) -> int:  # hashes of a token, each of which chooses one row
        return (self.n - 1) * self.heads

    @property
    def n_embd(self) -> int:
        """Number of values in all ``n_heads`` table rows that a token chooses."""
        return self.n_heads * self.n_row

    @property
    def n_before(self) -> int:
        """Number of tokens before the current one that the convolution reads."""
        return (self.n_conv - 1) * self.n


@dataclass(frozen=True)
class BlockTaps:
    """Sizes of a layer's convolutions within a block of tokens that is drafted at once (DFlash 2).
    Each token computes values that are added to the convolutions' weights; ``group`` neighbouring
    channels share a value.
    """

    n: int  # taps of a convolution: the token itself, and n - 1 tokens before it
    group: int  # divides n_channels
    n_channels: int  # width of the hidden states

    @property
    def n_deltas(self) -> int:
        """Number of values that a token computes for the weights of both convolutions of a
        sublayer, the one before it and the one after it.
        """
        return 2 * self.n * self.n_channels // self.group


@dataclass(frozen=True)
class Layer:
    """One layer: the names of its mixer and FFN in MIXERS and FFNS ("": none), and their sizes in
    elements (0 for a missing mixer or FFN).
    """

    n_head: int  # query heads
    n_head_kv: int  # key and value heads; divides n_head
    head_dim: int  # of queries and keys
    head_dim_v: int  # of values
    n_ff: int  # width of a dense FFN
    # The layer whose keys and values it attends to: itself, or an earlier one; in a drafter, from
    # ``n_layer`` on, one of the model that it drafts for.
    kv_from: int
    causal: bool = True  # tokens do not attend to later ones
    window: int = 0  # attention window in tokens, the current one included; 0: unlimited
    chunked: bool = False  # the window starts at the last multiple of ``window``
    rope: int | None = 0  # index of its table in Config.ropes; None: no rope
    q_rope: int | None = None  # table of queries, if another; it may only scale, not rotate
    mixer: str = "attention"
    ffn: str = "gated"
    activation: str = ""  # of a dense FFN or the shared expert; "": the architecture's
    experts: Experts | None = None
    wide_norm: bool = False  # q/k norms, if any, span all heads together
    v_norm: bool = False  # values have a norm without weight
    qk_norm: bool = False  # each head's queries and keys have a norm without weight
    curve: tuple[float, ...] = ()  # parameters of xIELU, see kernels/elementwise/xielu.py
    n_own: int = 0  # width of per-layer embeddings (``ffns/layer_embeddings.py``); 0: none
    cut: float = 0.0  # of a sparse gate: threshold in standard deviations above the mean
    state: Recurrence | None = None
    latent: Latent | None = None
    compressed: Compressed | None = None
    indexer: Indexer | None = None  # None: queries see all keys
    ngrams: Ngrams | None = None  # embeddings that are added before it
    hyper: Hyper | None = None
    n_norm_rank: int = 0  # rank of the gates of its norms; 0: none
    relative: RelativeBias | None = None  # None: scores have no biases of their queries
    chosen_by: int = -1  # the layer whose indexer chooses its keys; -1: its own
    n_cross: int = 0  # most rows of an encoder that it attends to; 0: no cross attention
    block_taps: BlockTaps | None = None  # None: no convolutions within drafted blocks


@dataclass(frozen=True)
class DraftTraits:
    """Traits of a drafter that reads the states of another model, its target.

    layers: the target's layers before which it reads states (the number of layers: after the last);
        empty: EAGLE 3's usual three, if a file names none.
    norm_before: the target's states, concatenated, have a norm before the matrix ``fc``, which
        fuses them.
    norm_residual: the residual stream starts with the norm of the fused states, not with these.
    n_block: tokens of a block that is drafted at once, its first token included; 0: tokens are
        drafted one after the other.
    mask: the token in the places of a block that are to be drafted.
    anchored: a block's first row, that of the text's last token, predicts the next one; else the
        row of each drafted place predicts its own token.
    n_markov: rank of the bias of logits by the token before (DSpark); 0: none.
    n_selector: rank of the scores that choose among each place's best tokens by the token before
        (DFlash 2); 0: none.
    n_candidates: number of best tokens of each place among which the selector chooses.
    """

    layers: tuple[int, ...] = ()
    norm_before: bool = False
    norm_residual: bool = False
    n_block: int = 0
    mask: int = 0
    anchored: bool = False
    n_markov: int = 0
    n_selector: int = 0
    n_candidates: int = 0


@dataclass(frozen=True)
class Clusters:
    """An output matrix whose rows form ``n`` clusters of equal size. For each token only the rows
    of the ``n_used`` clusters with the largest scores are multiplied.
    """

    n: int
    n_used: int


@dataclass(frozen=True)
class Switch:
    """Adapters within a model, which control tokens in the text choose (``models/switch.py``).

    n: number of adapters; as an adapter's number, 0 stands for none.
    rank: rank of the adapters' matrices.
    tokens: ids of the control tokens, in the order of the adapters that they choose: 1 to ``n``,
        or 0 to ``n``.
    substitutes: for each control token, the token whose embedding is read in its place.
    gain: size of the keys by which the model attends to control tokens (``models/switch.py``).
    latest: a text's last control token chooses the adapter; else the rounded mean of the numbers
        of all chosen adapters does.
    """

    n: int
    rank: int
    tokens: tuple[int, ...]
    substitutes: tuple[int, ...]
    gain: float
    latest: bool = False


@dataclass(frozen=True)
class MediaTraits:
    """Traits of a decoder that reads rows of pictures and sound (``kvcache/media.py``).

    sections: how many of a head's pairs each component of a position (time, row, column) rotates;
        empty: a position is one number.
    interleaved: the components take turns over the pairs (time, row, column, time ...) until row
        and column have their numbers of pairs; else each component has consecutive pairs.
    spans: the layers in which the rows of a bidirectional span attend to each other in both
        directions: "all", those with a "window", or none ("").
    n_deepstack: number of layers, from the first on, after each of which further rows of a picture
        are added to the states (deepstack).
    """

    sections: tuple[int, ...] = ()
    interleaved: bool = False
    spans: str = ""
    n_deepstack: int = 0

    def spans_in(self, window: int) -> bool:
        """Return whether the rows of one picture attend to each other in both directions in layers
        with this attention window, in tokens (0: none).
        """
        return self.spans == "all" or (self.spans == "window" and window > 0)

    def component_of(self, n_pairs: int) -> tuple[int, ...]:
        """Return for each of a head's ``n_pairs`` rotated pairs the component of the position that
        rotates it: 0 for time, 1 for the row, 2 for the column.
        """
        if not self.sections:
            return (0,) * n_pairs
        if not self.interleaved:
            runs = [which for which, n in enumerate(self.sections[:3]) for _ in range(n)]
            return (*runs, *(0 for _ in range(len(runs), n_pairs)))[:n_pairs]
        found = [0] * n_pairs
        for which in (1, 2):
            for pair in range(which, min(3 * self.sections[which], n_pairs), 3):
                found[pair] = which
        return tuple(found)


@dataclass(frozen=True)
class Config:
    """The hyper-parameters of one model; sizes in elements, positions in tokens."""

    arch: Arch
    n_embd: int  # width of the hidden states
    n_vocab: int  # rows of token_embd
    n_ctx_train: int  # context length in training
    norm_eps: float  # of every norm, the q/k norms included
    embd_scale: float  # token embeddings are multiplied by it; mostly 1.0
    attn_scale: float  # q.k is multiplied by it
    attn_softcap: float  # c: scores become c * tanh(score / c); 0.0: off
    logit_scale: float  # logits are multiplied by it, before their softcap
    logit_softcap: float  # softcap of the logits; 0.0: off
    pooling: str  # of hidden states to one vector: "mean", "first", "last"; "none": see pool
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]
    parallel: bool = False  # FFN and attention read the same states, and both are added
    attn_norm: str = "attn_norm"  # name of the norm before the mixer
    ffn_norm: str = "ffn_norm"  # name of the norm before the FFN; "": it shares the mixer's
    n_positions: int = 0  # rows of learned positions, and so the longest context; 0: none
    n_ctx_most: int = 0  # longest context whose attention treadle supports; 0: any
    embd_norm: bool = False  # token embeddings have a norm without weights
    post_norm_eps: float = 0.0  # of norms after products; 0.0: norm_eps
    n_types: int = 0  # token types: the second marks the second text of a pair; 0: none
    alibi: float = 0.0  # ALiBi: see kernels/attention/work_item.py; 0.0: off
    n_buckets: int = 0  # distance buckets of a relative attention bias (T5); 0: none
    clamp: float = 0.0  # queries, keys and values are clamped to -clamp..clamp; 0.0: off
    value_scale: float = 1.0  # values are multiplied by it
    residual_scale: float = 1.0  # the residual stream is kept divided by it
    n_target: int = 0  # width of the states of the model that it drafts for; 0: it generates text
    draft: DraftTraits | None = None  # of a drafter that reads states from between layers
    n_draft_vocab: int = 0  # logits per token, in a drafter of some of the tokens; 0: n_vocab
    n_unpadded: int = 0  # rows of the output that are tokens, if it has more; 0: all
    clusters: Clusters | None = None  # of the rows of the output; None: all rows are multiplied
    taps: tuple[int, ...] = ()  # layers before which the output "tapped" has the states
    scores: bool = False  # the head returns a score of a text, and no logits
    n_streams: int = 1  # streams of hidden states (AltUp, hyper-connections)
    attn_res_block_size: int = 0  # layers; the states before each block are kept; 0: none
    n_rows_own: int = 0  # tokens with per-layer embeddings, if not all
    norm_gate_gain: float = 1.0  # factor of the gates of norms
    norm_gate_up_first: bool = False  # their matrix "up" makes the rank, and "down" the gate
    n_loops: int = 1  # runs of the file's layers; each run has its own records in ``layers``
    weights_of: tuple[int, ...] = ()  # the file's layer whose weights each has; empty: its own
    loop_norm: bool = False  # the last norm is applied between loops too
    n_laurel: int = 0  # rank of the low-rank product parallel to a mixer (LAuReL); 0: none
    optional: frozenset[str] = frozenset()  # optional tensors of the file, without "blk.N."
    factors: frozenset[str] = frozenset()  # scalars by which a matrix' products are multiplied
    bounds: frozenset[str] = frozenset()  # tensors that clamp matrices' inputs and products
    ignored: tuple[str, ...] = ()  # tensors of the file that the graph does not use
    stage: range | None = None  # the layers that are computed here; None: all
    media: MediaTraits = MediaTraits()
    with_media: bool = False  # the plan is for batches with rows of media
    encoder: Config | None = None  # of the encoder that reads prompts, if there is one
    start_id: int = 0  # the first token of the text that follows an encoder's rows
    switch: Switch | None = None  # of the adapters within the model, if it has some

    def attending_to(self, n_rows: int) -> Config:
        """Return a copy whose layers all have cross attention to up to ``n_rows`` rows of an
        encoder.
        """
        layers = (replace(layer, n_cross=n_rows) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @cached_property
    def pools(self) -> tuple[PoolSpec | StateSpec, ...]:
        """The cache pools of the layers."""
        found: tuple[PoolSpec | StateSpec, ...] = _graph_of(self).pools(self)
        return found

    @cached_property
    def main_output(self) -> str:
        """Name of the output that plans have by default: "logits", or "embedding" for models
        without logits.
        """
        writes = "logits" in _graph_of(self).outputs and not self.scores
        return "logits" if writes else "embedding"

    @cached_property
    def unread(self) -> tuple[str, ...]:
        """Names of the file's tensors that nothing reads and that valid files do not usually
        have.
        """
        found: tuple[str, ...] = import_module("treadle.models.load").unread_tensors(self)
        return found

    @cached_property
    def digest(self) -> str:
        """A hash of all fields, equal in every process for equal configurations. Raises TypeError
        if a field has a value of an unknown type.
        """
        from treadle.models.digest import digest_of

        return digest_of(self)

    @property
    def pool(self) -> str:
        """The pooling of embeddings, "mean", "first" or "last": ``pooling``, but "mean" where that
        is "none".
        """
        return "mean" if self.pooling == "none" else self.pooling

    @property
    def n_logits(self) -> int:
        """Number of logits per token: the vocabulary's size, or the number of tokens that a
        drafter can draft.
        """
        return self.n_draft_vocab or self.n_vocab

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def stage_layers(self) -> range:
        """The layers that this stage computes. Layers before and after them run in other stages."""
        return range(self.n_layer) if self.stage is None else self.stage

    @property
    def tied(self) -> bool:
        """Whether the token embeddings are also the output matrix."""
        return "output.weight" not in self.optional

    @property
    def causal(self) -> bool:
        """Whether no token attends to later ones. Otherwise all tokens of an input are in one
        run.
        """
        return all(layer.causal for layer in self.layers)

    @property
    def n_batch(self) -> int:
        """Number of tokens of a prompt per run, if the prompt may be split: N_BATCH_EXPERTS for
        models with experts, else N_BATCH. It is N_BATCH too if a layer has an indexer or a relative
        bias: their scores take memory proportional to a run's tokens times the context.
        """
        if any(layer.indexer or layer.relative for layer in self.layers):
            return N_BATCH
        return N_BATCH_EXPERTS if any(layer.experts for layer in self.layers) else N_BATCH

    @property
    def centred(self) -> bool:
        """Whether norms are LayerNorms, which subtract the mean."""
        return self.arch.norm not in ("rms", "bare_rms")

    @property
    def has_bare_norms(self) -> bool:
        """Whether norms of hidden states have no weights."""
        return self.arch.norm in ("bare", "bare_rms")


def _graph_of(config: Config) -> Any:
    """Return the ``Graph`` of a configuration's architecture. It is imported by name here, since
    graphs import this module.
    """
    return import_module("treadle.models.graphs").GRAPHS[config.arch.graph]
