"""Gemma 4's assistant: a drafter whose layers have no keys and values, but read those that the
model has of the text.

::

    x = pre_projection([embedding, state])      both the model's, of the last token
    x = layer(x)                                attention over the model's keys and values
    logits = linear(norm(x))
    state = post_projection(norm(x))            for the next token that it drafts

All tokens of one draft have the position of the text's last token, and attend to the tokens before
it. Layers with a window read the model's last layer with one, the others its last layer without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.files.keys import SIZE_MAX
from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, halves_of, normed
from treadle.models.keys import NEXTN
from treadle.models.layer import build_layer
from treadle.models.mixers.names import SHARED
from treadle.models.structure import TensorRow

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.archs import Arch
    from treadle.models.config import Config, Layer
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

GRAPH = "assistant"
GIVEN = "assistant.input"  # embedding and state of each token, side by side
N_TARGET = "embedding_length_out"


def build(g: Ops) -> Rows:
    """Build the layers on the projected input."""
    x = g.given(GIVEN, 2 * g.config.n_target)
    x = g.linear("nextn.pre_projection", x, "nextn.pre_projection")
    for i in g.config.here:
        x = build_layer(g, i, g.layer(i, x), *halves_of(g.config.layers[i]))
    return g.layer(g.config.here.stop, x)


def ahead(g: Ops, x: Rows) -> None:
    """Output the logits of the requested rows, and the state that follows each."""
    h = normed(g, g.outputs(x))
    g.result("logits", g.linear("output", h, "token_embd"))
    g.result("ahead", g.linear("nextn.post_projection", h, "nextn.post_projection"))


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Read the config; layers do not know yet which of the model's they read (``bound``)."""
    keys.values = {key: value for key, value in keys.values.items() if key != NEXTN}  # all are
    config = reading.read(keys, arch)
    n_target = keys.integer(N_TARGET, lo=1, hi=SIZE_MAX)
    most = config.layers[0]
    head_dim = keys.integer("attention.key_length_swa", most.head_dim, lo=1, hi=SIZE_MAX)
    head_dim_v = keys.integer("attention.value_length_swa", most.head_dim_v, lo=1, hi=SIZE_MAX)
    layers = []
    for i, layer in enumerate(config.layers):
        at = replace(layer, mixer=SHARED, kv_from=config.n_layer + i)
        if at.window:
            at = replace(at, head_dim=head_dim, head_dim_v=head_dim_v)
        layers.append(at)
    return replace(config, n_target=n_target, layers=tuple(layers))


def bound(config: Config, gguf: GGUF, target: Config) -> Config:
    """Return the config of an assistant of file ``gguf`` beside a model: its layers' ``kv_from``
    are the model's layers, counted from behind its own.

    Raises UnsupportedError if ``target`` is not a model that it can draft for.
    """

    def refuse(what: str) -> UnsupportedError:
        return UnsupportedError(f"{gguf.path}: cannot draft for this model: {what}")

    if target.arch.nextn != "normed" or not all(layer.v_norm for layer in target.layers):
        raise refuse(f"it reads the keys and values of a Gemma 4, not of {target.arch.name}")
    if target.n_embd != config.n_target:
        raise refuse(f"it drafts for states of {config.n_target} values, not {target.n_embd}")
    layers: list[Layer] = []
    for i, layer in enumerate(config.layers):
        alike = [at for at in target.layers if at.window == layer.window]
        if not alike:
            found = f"a window of {layer.window} tokens" if layer.window else "no window"
            raise refuse(f"its layer {i} has {found}, as none of the model's has")
        source = target.layers[alike[-1].kv_from]
        sizes = source.head_dim, source.head_dim_v
        if (layer.head_dim, layer.head_dim_v) != sizes or layer.n_head % source.n_head_kv:
            found = f"{layer.n_head} heads of {layer.head_dim}"
            raise refuse(f"its layer {i} has {found}, the model {source.n_head_kv} of {sizes[0]}")
        from_ = config.n_layer + alike[-1].kv_from
        layers.append(replace(layer, n_head_kv=source.n_head_kv, kv_from=from_))
    return replace(config, layers=tuple(layers))


ASSISTANT = replace(
    DECODER,
    build=build,
    outputs={"logits": ahead, "ahead": ahead},
    rows=(
        *DECODER.rows,
        TensorRow("nextn.pre_projection.weight", ("n_embd", "twice_n_target")),
        TensorRow("nextn.post_projection.weight", ("n_target", "n_embd")),
    ),
    sizes=lambda config: {
        **DECODER.sizes(config),
        "n_target": config.n_target,
        "twice_n_target": 2 * config.n_target,
    },
    read=read,
)
