"""DFlash: a drafter that predicts a block of tokens at once (block diffusion); DSpark and DFlash 2,
which make each of them depend on the one before.

::

    h = norm(fc(the model's states before some layers, side by side))
    keys and values of each layer = products of h             of each token that the model ran

    x = embed(the text's last token, then the mask, as often as tokens are to be drafted)
    x = layer(x)                     attention over those keys and the block, in both directions
    logits = linear(norm(x))                                  of the places of the masks
    logits = logits + w2 w1[the token before]                 DSpark
    scores = logits + successor (predecessor[the token before] * hidden norm(x))
                                                 DFlash 2: of each place's largest logits

The sublayers of DFlash 2's layers have a short convolution within the block before them and one
after them (``mixers/block_convolved.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import FileError
from treadle.kernels.elementwise.top_records import N_TOP
from treadle.models.config import BlockTaps, DraftTraits
from treadle.models.drafters.target import (
    DRAFT_ROWS,
    FEATURES,
    PREDECESSOR,
    SUCCESSOR,
    TARGET_LAYERS,
    build_nothing,
    n_draft_vocab,
    sizes_of,
    target_layers,
)
from treadle.models.ffns import BLOCK_CONVOLVED as GATED_BLOCK_CONVOLVED
from treadle.models.graphs import decoder
from treadle.models.graphs.decoder import DECODER, halves_of
from treadle.models.graphs.limits import ACTIVATION, ACTIVATIONS
from treadle.models.graphs.reading import read_config
from treadle.models.mixers.names import BLOCK_CONVOLVED, KEYS_ALONE
from treadle.models.structure import TensorRow, with_bias

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows
    from treadle.models.structure import Sizes

KEYS = "keys"  # the output of runs that are given ``FEATURES``: nothing but keys and values
MARKOV = "markov"  # the output with logits and the bias by the token before
BASE = "dflash.logits"  # such a run's input: the logits without the bias
BLOCK = "block_size"
ANCHORED = "sample_from_anchor"
MASK = "tokenizer.ggml.mask_token_id"
USUAL_BLOCK = 16
BLOCK_MAX = 128  # logits rows of a run
RANK_MAX = 1 << 16
# The output with logits, and with the vector that a selector reads of each row.
SELECTOR_VECTORS = "selector_vectors"
SELECTOR_TOP = "selector_top_k"
SELECTOR_RANK = "selector_rank"
CONV_TAPS = "conv_kernel_size"
CONV_GROUP = "conv_group_size"
TAPS_MAX = 64
SELECTOR = "selector_hidden"


def logits(g: Ops, x: Rows) -> None:
    """Declare the output "logits": the logits of a block's rows. ``x`` is not used."""
    decoder.logits(g, decoder.build(g))


def selector_vectors(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits", of a block's rows, and SELECTOR_VECTORS: the products of their
    normed states with the selector's matrix, f32 ``[N, n_selector]``. ``x`` is not used.
    """
    x = g.outputs(decoder.build(g))
    h = decoder.normed(g, x, g.config.logit_scale)
    g.result("logits", g.linear("output", h, "output"))
    if g.config.logit_scale != 1.0:
        h = g.norm(f"{SELECTOR}.norm", x, "output_norm")
    g.result(SELECTOR_VECTORS, g.linear(SELECTOR, h, SELECTOR))


def keys(g: Ops, x: Rows) -> None:
    """Store each layer's keys and values, computed from the target's states (input FEATURES, f32
    ``[N, n_features]``: the states before several layers, side by side). ``x`` is not used.
    """
    assert g.config.draft is not None
    n_features = len(g.config.draft.layers) * g.config.n_target
    h = g.linear("fc", g.given(FEATURES, n_features), "fc")
    h = g.norm("enc.output_norm", h, "enc.output_norm")
    for i, layer in enumerate(g.config.layers):
        at = f"L{i}.attn"
        blk = f"blk.{i}.attn"
        if layer.mixer == KEYS_ALONE:
            k = v = g.linear(f"{at}.k", h, f"{blk}_k")
        else:
            k, v = g.linears(f"{at}.kv", h, [f"{blk}_k", f"{blk}_v"])
        k = g.norm(f"{at}.k_norm", k, f"{blk}_k_norm", heads=layer.n_head_kv)
        k = k if layer.rope is None else g.rope(f"{at}.rope", k, layer.rope)
        v = g.norm(f"{at}.v_norm", v, "", heads=layer.n_head_kv) if layer.v_norm else v
        g.call("kv_store", f"{at}.store", k, v, layer=i)


def markov(g: Ops, x: Rows) -> None:
    """Declare the output "logits" of DSpark: the logits in the input BASE, each row plus
    ``w2 w1[t]``, a low-rank bias by the token ``t`` before the place that the row predicts.
    """
    base = g.given(BASE, g.config.n_logits)
    token = g.embed("markov_w1", "markov_w1", 1.0)
    g.result("logits", g.add(base, g.linear("markov_w2", token, "markov_w2")))


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the drafter's config. Raises UnsupportedError for an unknown activation or a selector
    beside a Markov head, FileError for invalid keys.
    """
    if keys.has(ACTIVATION):
        word = keys.text(ACTIVATION)
        if word not in ACTIVATIONS:
            keys.refuse(ACTIVATION, f"{word!r:.60}: treadle supports {', '.join(ACTIVATIONS)}")
        # as in llama.cpp, where both names mean the approximation by tanh
        arch = replace(arch, activation="gelu" if word.startswith("gelu") else ACTIVATIONS[word])
    config = read_config(keys, arch)
    found = read_layers(keys)
    causal = keys.flag("attention.causal", False)
    taps = _block_taps(keys, config.n_embd)
    alone = taps is None and "blk.0.attn_v.weight" not in keys.gguf.tensors

    def made(layer: Layer) -> Layer:
        layer = replace(layer, causal=causal, v_norm=alone)
        if taps is not None:
            ffn = GATED_BLOCK_CONVOLVED
            return replace(layer, mixer=BLOCK_CONVOLVED, ffn=ffn, block_taps=taps)
        return replace(layer, mixer=KEYS_ALONE) if alone else layer

    layers = tuple(map(made, config.layers))
    drafter = with_traits(keys, replace(config, layers=layers), found)
    assert drafter.draft is not None
    traits = _with_selector(keys, drafter.draft)
    if not traits.n_candidates:
        return drafter
    # A selector's scores are added to the logits, which therefore keep their scale and softcap.
    scale, softcap = config.logit_scale, config.logit_softcap
    return replace(drafter, draft=traits, logit_scale=scale, logit_softcap=softcap)


def _block_taps(keys: ArchMetadata, n_embd: int) -> BlockTaps | None:
    """Return the sizes of the convolutions within blocks; None if the file has none. Raises
    FileError if their group does not divide ``n_embd``.
    """
    if not keys.has(CONV_TAPS):
        return None
    group = keys.integer(CONV_GROUP, lo=1, hi=n_embd)
    if n_embd % group:
        keys.fail(CONV_GROUP, f"is {group}", f"a divisor of {n_embd}, the width of the states")
    return BlockTaps(keys.integer(CONV_TAPS, lo=1, hi=TAPS_MAX), group, n_embd)


def read_layers(keys: ArchMetadata) -> tuple[int, ...]:
    """Return the numbers of the target's layers before which the drafter reads states. Raises
    FileError if the file names none.
    """
    found = target_layers(keys)
    if not found:
        keys.fail(TARGET_LAYERS, "has no entries", "the layers whose states are read")
    return found


def with_traits(keys: ArchMetadata, config: Config, layers: tuple[int, ...]) -> Config:
    """Return ``config`` with the file's traits of a drafter of blocks (``DraftTraits``) that reads
    the target's states before ``layers``. Logits lose their scale and softcap, which do not change
    the largest one.
    """
    rank = keys.gguf.tensors.get("markov_w1.weight")
    n_markov = rank.shape[-1] if rank is not None else 0
    traits = DraftTraits(
        layers,
        n_block=keys.integer(BLOCK, USUAL_BLOCK, lo=2, hi=BLOCK_MAX),
        mask=_mask(keys, config.n_vocab),
        anchored=bool(n_markov) and keys.flag(ANCHORED, True),
        n_markov=n_markov,
    )
    return replace(
        config,
        n_target=config.n_embd,
        draft=traits,
        n_draft_vocab=n_draft_vocab(keys, config.n_vocab),
        logit_scale=1.0,  # drafts are the largest logits
        logit_softcap=0.0,
    )


def _with_selector(keys: ArchMetadata, traits: DraftTraits) -> DraftTraits:
    """Return ``traits`` with the sizes of the drafter's selector; unchanged if the file has none.
    Raises FileError for a missing tensor, UnsupportedError for a Markov head beside the selector.
    """
    n_candidates = keys.integer(SELECTOR_TOP, 0, lo=0, hi=N_TOP)
    if not n_candidates:
        return traits
    if traits.n_markov:
        keys.refuse(SELECTOR_TOP, "a selector beside a Markov head is not supported")
    for name in (PREDECESSOR, SUCCESSOR, f"{SELECTOR}.weight"):
        if name not in keys.gguf.tensors:
            raise FileError("the tensor is missing", path=keys.gguf.path, where=name)
    rank = keys.integer(SELECTOR_RANK, lo=1, hi=RANK_MAX)
    return replace(traits, n_selector=rank, n_candidates=n_candidates)


def _mask(keys: ArchMetadata, n_vocab: int) -> int:
    """Return the id of the mask token, which stands in a block for the tokens to be drafted. Raises
    FileError if the file has none below ``n_vocab``.
    """
    mask = keys.gguf.metadata.get(MASK)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < n_vocab:
        found = "is missing" if mask is None else f"is {mask!r:.40}"
        expected = f"a token below {n_vocab}"
        raise FileError(found, path=keys.gguf.path, where=MASK, expected=expected)
    return mask


BLOCK_ROWS = (
    *DRAFT_ROWS,
    TensorRow("markov_w1.weight", ("n_vocab", "n_markov"), optional=True),
    TensorRow("markov_w2.weight", ("n_logits", "n_markov"), optional=True),
    *with_bias("conf_proj", "one", "n_confidence", optional=True),
    TensorRow(PREDECESSOR, ("n_vocab", "n_selector"), optional=True),
    TensorRow(SUCCESSOR, ("n_vocab", "n_selector"), optional=True),
    TensorRow(f"{SELECTOR}.weight", ("n_selector", "n_embd"), optional=True),
)


def block_sizes(config: Config) -> Sizes:
    """Return the sizes named in the shapes of BLOCK_ROWS, by name."""
    return {
        **sizes_of(config, len(config.draft.layers) if config.draft else 0),
        "n_markov": config.draft.n_markov if config.draft else 0,
        "n_selector": config.draft.n_selector if config.draft else 0,
        "n_confidence": config.n_embd + (config.draft.n_markov if config.draft else 0),
    }


DFLASH = replace(
    DECODER,
    build=build_nothing,
    outputs={"logits": logits, KEYS: keys, MARKOV: markov, SELECTOR_VECTORS: selector_vectors},
    rows=BLOCK_ROWS,
    sizes=block_sizes,
    sublayers=halves_of,
    read=read,
    apart=True,
)
