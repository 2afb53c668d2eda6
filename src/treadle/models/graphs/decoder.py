"""The decoder: layers of a mixer and an FFN on one residual stream.

::

    x = embed(ids)
    x = layer(x)                         each: models/layer.py
    logits = linear(norm(x))

A pipeline stage (``Config.stage``) has some of the layers. Its input is the hidden states before
them, its output the states after them (``stream``), except at the ends of the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.errors import UnsupportedError
from treadle.models.ffns import FFNS
from treadle.models.graphs.reading import POSITIONS, read
from treadle.models.layer import GATE_UP, build_layer, gated_norm
from treadle.models.mixers import MIXERS
from treadle.models.structure import Graph, Sublayer, TensorRow, with_bias

if TYPE_CHECKING:
    from collections.abc import Callable

    from treadle.models.config import Layer
    from treadle.models.ops import Ops, Rows

    Halves = Callable[[Layer], tuple[Sublayer, ...]]


TAPPED = "tapped"


def halves_of(layer: Layer) -> tuple[Sublayer, ...]:
    """Return a layer's mixer and FFN; only one of them, or none, if the layer lacks the others."""
    mixer = (MIXERS[layer.mixer],) if layer.mixer else ()
    return *mixer, *((FFNS[layer.ffn],) if layer.ffn else ())


def build(g: Ops, halves: Halves = halves_of) -> Rows:
    """Build this stage's layers; return the states after the last, f32 ``[N, n_embd]``. ``halves``:
    a function that returns a layer's sublayers.
    """
    x = first(g)
    here = g.config.stage_layers
    n_deepstack = g.config.media.n_deepstack if g.config.with_media else 0
    for i in here:
        x = build_layer(g, i, g.layer(i, x), *halves(g.config.layers[i]))
        x = g.steer(f"L{i}.control", x, layer=i)
        if i < n_deepstack:
            x = g.call("media_rows", f"L{i}.media", x, level=i + 1)
    return g.layer(here.stop, x)


def first(g: Ops) -> Rows:
    """Return the states before this stage's first layer: the embeddings, or the states of the stage
    before.
    """
    if g.config.stage_layers.start:
        return g.given("stream", g.config.n_embd)
    x = g.embed("token_embd", "token_embd", g.config.embd_scale)
    if g.config.embd_norm:
        x = g.norm("token_embd_norm", x, "")
    if g.config.with_media:  # after scale and norm: rows of media have their own
        x = g.call("media_rows", "token_embd.media", x)
    if g.config.n_positions:
        x = g.add_rows("position_embd", x, "position_embd", by="position")
    if g.has("token_types.weight"):
        by = "type" if g.config.n_types > 1 else "first"
        x = g.add_rows("token_types", x, "token_types", by=by)
    if g.has("token_embd_norm.weight"):
        x = g.norm("token_embd_norm", x, "token_embd_norm", centred=g.config.centred)
    return x


def normed(g: Ops, x: Rows, scale: float = 1.0) -> Rows:
    """Return the states ``x`` after the model's last norm and its gate, if it has one, times
    ``scale``. A model without a last norm gets ``x`` unchanged, without ``scale``.
    """
    weight = "output_norm" if g.has("output_norm.weight") else ""
    if not (weight or g.config.has_bare_norms):  # with norms after the sums, x is normed already
        return x
    # A gate is made of the norm's result without ``scale``, which is then a factor of the gate.
    of_norm = 1.0 if g.has(f"output_norm{GATE_UP}.weight") else scale
    h = g.norm("output_norm", x, weight, centred=g.config.centred, scale=of_norm)
    return gated_norm(g, "output_norm", h, weight, gate_scale=scale)


def logits(g: Ops, x: Rows) -> None:
    """Declare the output "logits", f32 ``[n_outputs, n_logits]``, of the requested rows of the
    states ``x``. Raises UnsupportedError for a head that scores pairs of texts.
    """
    if g.config.scores:
        raise UnsupportedError(
            "no logits: the file's head is a scoring head and does not generate text"
        )
    if g.has(f"output_norm{GATE_UP}.weight"):  # steps of gates take rows of all tokens
        h = g.call("output_rows", "output_rows", normed(g, x, g.config.logit_scale))
    else:
        h = normed(g, g.outputs(x), g.config.logit_scale)
    name = "token_embd" if g.config.tied else "output"
    g.result("logits", g.linear("output", h, name))


def ahead(g: Ops, x: Rows) -> None:
    """Declare the outputs "logits", of the requested rows, and "ahead": the states of all tokens,
    f32 ``[N, n_embd]``, which an MTP layer reads (``spec_decode/mtp.py``); normed if ``Arch.nextn``
    is ``normed``.
    """
    logits(g, x)
    if g.config.arch.nextn == "normed":
        x = g.norm("output_norm.all", x, "output_norm", centred=g.config.centred)
    g.result("ahead", x)


def tapped(g: Ops, x: Rows) -> None:
    """Declare the output "logits" of a plan whose main output is "tapped". Such a plan also outputs
    the states before each layer of ``Config.taps``, under the names ``tap_name`` returns; the op
    ``layer`` has declared these.
    """
    logits(g, x)


def tap_name(i: int) -> str:
    """Return the name of the output with the states before layer ``i``."""
    return f"tap.{i}"


def embedding(g: Ops, x: Rows) -> None:
    """Declare the outputs "pooled", f32 ``[n_inputs, n_embd]``: the normed states pooled as
    ``Config.pool`` says, and "embedding": the same rows scaled to length 1.
    """
    h = normed(g, x)
    how = g.config.pool
    g.result("pooled", g.pool("pool", h, how))
    g.result("embedding", g.pool("pool.unit", h, how, unit=True))


def states(g: Ops, x: Rows) -> None:
    """Declare the output "states": the states of all tokens after the last norm."""
    g.result("states", normed(g, x))


def stream(g: Ops, x: Rows) -> None:
    """Declare the output "stream": the states of all tokens, for the layers of the next stage."""
    g.result("stream", x)


MODEL_ROWS = (
    TensorRow("token_embd.weight", ("n_vocab", "n_embd")),
    TensorRow(POSITIONS, ("n_positions", "n_embd"), optional=True),  # learned
    *with_bias("output_norm", "n_embd"),
    *with_bias("output", "n_vocab", "n_embd", optional=True),  # absent: tied to token_embd
    TensorRow("rope_freqs.weight", ("n_rope_freq",), optional=True),  # Llama 3: see Rope
    TensorRow("rope_factors_short.weight", ("n_rope_freq",), optional=True),  # Phi 3's
    TensorRow("rope_factors_long.weight", ("n_rope_freq",), optional=True),
)
LAYER_ROWS = (*MIXERS["attention"].rows, *FFNS["gated"].rows)  # of most decoders


EMBD_NORM_ROWS = with_bias("token_embd_norm", "n_embd", optional=True)
# Of graphs whose layers cannot be split into stages.
UNSTAGED_OUTPUTS = {"logits": logits, "embedding": embedding, "states": states}
DECODER = Graph(
    build=build,
    outputs={
        **UNSTAGED_OUTPUTS,
        "stream": stream,
        "ahead": ahead,
        TAPPED: tapped,
    },
    rows=(*MODEL_ROWS, *EMBD_NORM_ROWS),
    sizes=lambda config: {
        "one": 1,
        "n_vocab": config.n_vocab,
        "n_embd": config.n_embd,
        "n_rope_freq": config.ropes[0].n_pairs if config.ropes else 0,
        "n_positions": config.n_positions,
        "n_types": config.n_types,
    },
    sublayers=halves_of,
    read=read,
    parts=lambda: (*MIXERS.all_constants(), *FFNS.all_constants()),
)
