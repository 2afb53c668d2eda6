"""HRM-Text: two stacks of layers that run in turn, several times, on two states of each token.

::

    high = embed(ids)
    low = init
    for each high cycle:
        for each low cycle: low = low_stack(high + low)
        high = high_stack(high + low)
    logits = linear(high)

A stack ends with a norm; no norm has weights. The file has the layers of the low stack, then those
of the high one. A config has a record for each layer of each run of a stack, with its own keys and
values. Attention is causal, as in llama.cpp. In transformers the tokens of a prompt also attend to
later ones, but only if the caller marks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.models.graphs import reading
from treadle.models.graphs.decoder import DECODER, UNSTAGED_OUTPUTS, first, halves_of
from treadle.models.graphs.looped.nanbeige import LoopedOps
from treadle.models.keys import N_LAYER_MAX
from treadle.models.layer import build_layer
from treadle.models.structure import Graph, TensorRow

if TYPE_CHECKING:
    from treadle.models.archs import Arch
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops, Rows

PER_STACK = "hrm.layers_per_stack"
HIGH_CYCLES = "hrm.h_cycles"
LOW_CYCLES = "hrm.l_cycles"
PREFIX = "hrm.prefix_lm"  # prompts whose tokens all see each other are possible; not used here
INIT = "hrm_z_l_init"
MOST_CYCLES = 64


def read(keys: ArchMetadata, arch: Arch) -> Config:
    """Return the config of all runs of both stacks, with one record for each layer of each run.
    ``Config.weights_of`` has for each record the number of the layer in the file whose weights it
    uses. Raises FileError if the key ``block_count`` is not the number of records.
    """
    n = keys.integer(PER_STACK, lo=1, hi=N_LAYER_MAX)
    high, low = (keys.integer(key, lo=1, hi=MOST_CYCLES) for key in (HIGH_CYCLES, LOW_CYCLES))
    n_layer = n * high * (low + 1)
    if keys.integer("block_count", lo=1, hi=N_LAYER_MAX) != n_layer:
        found = f"is {keys.get('block_count')}"
        keys.fail("block_count", found, f"{n_layer}: {n} a stack, {low} times low, then high")
    weights_of = [i + n * (cycle == low) for cycle in range(low + 1) for i in range(n)] * high
    return replace(reading.read(keys, arch), weights_of=tuple(weights_of))


def build(g: Ops) -> Rows:
    """Build all runs of both stacks; return the states after the last run of the high stack, before
    its norm, which is the model's last norm.
    """
    of = g.config.weights_of
    n = (max(of) + 1) // 2
    looped: Any = LoopedOps(g, of.__getitem__)
    high = first(g)
    embd = g.embed("low", "token_embd", g.config.embd_scale)
    given: Rows = g.add_rows("low.init", embd, INIT, by="first")
    for start in range(0, len(of), n):
        x = given
        for i in range(start, start + n):
            x = build_layer(looped, i, g.layer(i, x), *halves_of(g.config.layers[i]))
            x = g.steer(f"L{i}.control", x, layer=i)
        if start + n == len(of):
            break
        # Its sum with the other state is one step, and a later sum another.
        made, kept = (g.norm(f"L{start + n - 1}.{name}", x, "") for name in ("stack_norm", "state"))
        if of[start] < n:
            low = kept
            given = g.add(high, made)
        else:
            high = kept
            given = g.add(low, made)
    return g.layer(g.config.stage_layers.stop, x)


class StackedGraph(Graph):
    """A graph whose tensors are those of both stacks' layers, each once, not once per run."""

    def tensors(self, config: Config) -> Iterator[tuple[TensorRow, dict[str, tuple[int, ...]]]]:
        n = max(config.weights_of) + 1
        return super().tensors(replace(config, layers=config.layers[:n]))


# No "stream": layers of several stages would need the same weights.
HRM = StackedGraph(
    build=build,
    outputs=UNSTAGED_OUTPUTS,
    rows=(*DECODER.rows, TensorRow(f"{INIT}.weight", ("n_embd",))),
    sizes=DECODER.sizes,
    sublayers=halves_of,
    read=read,
    parts=DECODER.parts,
)
