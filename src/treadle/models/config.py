"""What a model is: hyper-parameters, and a record for each of its layers and rope tables.

A graph reads them from a file's keys, checked; nothing behind that boundary checks again: numbers
are in range, sizes divide, and every tensor that a layer names exists in its shape.
"""

from __future__ import annotations

from treadle.base.fast_dataclass import dataclass
from treadle.models.archs import Arch
from treadle.models.rope import Rope

N_BATCH = 512  # tokens of a text that one run takes
# The same with experts: each is unpacked once a run, for those of the tokens that meet it.
N_BATCH_EXPERTS = 2048


@dataclass(frozen=True)
class Experts:
    """A layer's experts: how many, how wide, and how a token's are chosen and weighed."""

    n: int
    n_used: int  # by a token
    n_ff: int  # of each
    n_ff_shared: int = 0  # of those that every token has, together; 0: there are none
    shared_fused: bool = False  # the rows of their gate and those of up are one matrix
    gating: str = "softmax"  # of all scores; or "sigmoid" of each
    norm: bool = False  # the weights of those chosen are made to add up to 1
    shared_mean: bool = False  # what they give and what the others give is averaged, not added
    scale: float = 1.0  # of the weights
    per_chunk: int = 1  # neighbours that share one more expert, a small one
    n_ff_chunk: int = 0  # of those; 0: there are none
    chunk_scale: float = 1.0  # by which its weights are less
    jitter: float = 0.0  # of SparseMixer's choices, see kernels.route; 0: they are others
    cap: float = 0.0  # of scores: they become cap * tanh(score / cap); 0.0: off
    n_groups: int = 1  # of neighbours: a token's experts are in few of them
    n_groups_used: int = 1
    n_latent: int = 0  # width of the space that they work in; 0: that of the states
    activation: str = ""  # of those chosen; "": the architecture's


@dataclass(frozen=True)
class Recurrence:
    """Sizes of a layer with a state of fixed size. A short convolution has no heads."""

    n_conv: int  # taps of its convolution
    n_channels: int  # that it is of, each by itself
    n_head: int = 0
    head_dim: int = 0  # values of a head
    n_state: int = 0  # that its state has for each of them
    n_group: int = 1  # of heads that share keys and queries (B and C of Mamba)
    norm_eps: float = 0.0  # of the norm behind its heads, or of those of Mamba-1's dt, B and C
    n_rank: int = 0  # of what Mamba-1's steps are made of
    ranks: tuple[int, ...] = ()  # of WKV-7's decays, rates, mixed values and gates; 0: no gates
    beta_most: float = 1.0  # of the delta rule: above 1 a state may change its sign
    normed: bool = False  # Mamba-1's dt, B and C are, without weights (Falcon)

    @property
    def n_inner(self) -> int:
        return self.n_head * self.head_dim

    @property
    def n_keys(self) -> int:
        return self.n_group * self.n_state

    @property
    def n_values(self) -> int:
        """Of the state: the convolution's last inputs, then each head's."""
        return (self.n_conv - 1) * self.n_channels + self.n_inner * self.n_state


@dataclass(frozen=True)
class Latent:
    """Sizes of latent attention: tokens keep one row that all heads share, of ``n_kv_rank`` dims
    and ``n_rope`` turned ones, which is its ``head_dim``.
    """

    n_q_rank: int  # of queries; 0: they are made of the states at once
    n_kv_rank: int
    n_nope: int  # dims of a head's query that do not turn
    n_rope: int  # those that do, behind them
    n_v: int  # dims of a head's value
    norm_eps: float  # of the norms of both ranks

    @property
    def n_q(self) -> int:
        """Dims of a head's query."""
        return self.n_nope + self.n_rope

    @property
    def n_row(self) -> int:
        """Values that a token keeps."""
        return self.n_kv_rank + self.n_rope


@dataclass(frozen=True)
class Layer:
    """One layer: its two halves, by their names in MIXERS and FFNS ("": it has none), and their
    sizes in elements, 0 where it has no such half.
    """

    n_head: int
    n_head_kv: int  # divides n_head
    head_dim: int  # of queries and keys
    head_dim_v: int
    n_ff: int
    kv_from: int  # the layer whose keys and values it attends to: itself, or an earlier one
    causal: bool = True  # tokens see none behind them
    window: int = 0  # tokens that it sees, the current one included; 0: all of them
    chunked: bool = False  # so many from the last multiple of it on
    rope: int | None = 0  # index of its table in Config.ropes; None: nothing is turned
    q_rope: int | None = None  # of queries, where they have another; with pairs that turn or not
    mixer: str = "attention"
    ffn: str = "gated"
    activation: str = ""  # of an FFN without experts, and of the shared one; "": the architecture's
    experts: Experts | None = None  # of an FFN that has some
    wide_norm: bool = False  # q/k norms, if any, are of all heads together
    v_norm: bool = False  # values have a norm without weight
    qk_norm: bool = False  # so have each head's queries and keys
    curve: tuple[float, ...] = ()  # of xIELU, the numbers that ``kernels.xielu`` names
    n_own: int = 0  # values of a token that are this layer's own; 0: there are none
    cut: float = 0.0  # of a sparse gate: deviations above the mean that values must be to pass
    state: Recurrence | None = None
    latent: Latent | None = None


@dataclass(frozen=True)
class Config:
    """The hyper-parameters of one model; sizes in elements, positions in tokens."""

    arch: Arch
    n_embd: int
    n_vocab: int  # rows of token_embd: logits per token
    n_ctx_train: int
    norm_eps: float  # of every norm, the q/k norms included
    embd_scale: float  # token embeddings are multiplied by it; 1.0 mostly
    attn_scale: float  # q.k is multiplied by it
    attn_softcap: float  # c: scores become c * tanh(score / c); 0.0: off
    logit_scale: float  # logits are multiplied by it, before their softcap
    logit_softcap: float  # the same on the logits
    pooling: str  # of a text's states into one vector: "mean", "first", "last"; "none": see pool
    ropes: tuple[Rope, ...]
    layers: tuple[Layer, ...]
    parallel: bool = False  # FFN and attention read the same states, and both are added
    attn_norm: str = "attn_norm"  # what the norm before the mixer is called
    ffn_norm: str = "ffn_norm"  # what the norm before the FFN is called; "": it has the mixer's
    n_positions: int = 0  # rows of learned positions, and so the longest context; 0: there are none
    n_ctx_most: int = 0  # tokens behind which attention is another, which treadle lacks; 0: any
    n_types: int = 0  # of tokens: the second is that of a pair's second text; 0: there are none
    alibi: float = 0.0  # scores fall with distance: see kernels.attention_item; 0.0: off
    n_buckets: int = 0  # of distances, with numbers to add to scores (T5); 0: there are none
    clamp: float = 0.0  # queries, keys and values are kept between -clamp and clamp; 0.0: off
    value_scale: float = 1.0  # values are multiplied by it
    scores: bool = False  # its head makes a number of a text, and it writes none
    n_streams: int = 1  # of states, of which layers compute one (AltUp)
    n_rows_own: int = 0  # tokens that have values of layers' own, where that is not all
    n_laurel: int = 0  # rank of the product beside a mixer (LAuReL); 0: there is none
    optional: frozenset[str] = frozenset()  # names, "blk.N." cut off, of those the file has
    factors: frozenset[str] = frozenset()  # tensors that the products of a matrix are multiplied by
    ignored: tuple[str, ...] = ()  # tensors that the graph does not use, none of them a layer's own
    stage: range | None = None  # the layers that are computed here; None: all

    @property
    def pool(self) -> str:
        """How a text's vector is pooled: by the mean, where the file names no pooling ("none")."""
        return "mean" if self.pooling == "none" else self.pooling

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def here(self) -> range:
        """The layers that are computed here. What comes before them is done elsewhere, and what
        comes behind them.
        """
        return range(self.n_layer) if self.stage is None else self.stage

    @property
    def tied(self) -> bool:
        """Whether the token embeddings are the output matrix as well."""
        return "output.weight" not in self.optional

    @property
    def causal(self) -> bool:
        """Whether no token sees one behind it. Else a text's tokens are all in one run."""
        return all(layer.causal for layer in self.layers)

    @property
    def n_batch(self) -> int:
        """Tokens of a text that one run takes, where the text may come in parts."""
        return N_BATCH_EXPERTS if any(layer.experts for layer in self.layers) else N_BATCH

    @property
    def centred(self) -> bool:
        """Whether norms are LayerNorms."""
        return self.arch.norm not in ("rms", "bare_rms")

    @property
    def bare(self) -> bool:
        """Whether norms of states have no weights."""
        return self.arch.norm in ("bare", "bare_rms")
