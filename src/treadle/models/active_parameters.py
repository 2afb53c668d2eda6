"""Active parameters: the weights that one token uses (some of the experts, one row of each
table).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from treadle.base.fast_classes import dataclass
from treadle.models.archs import LORA_A, LORA_B

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config, Experts

EMBEDDINGS = "token_embd.weight"
OUTPUT = "output.weight"
_EXPERTS = "exps."  # in the names of tensors with one matrix per expert
_TABLES = ("per_layer_token_embd.weight", "position_embd.weight", "token_types.weight")


@dataclass(frozen=True)
class Active:
    """The part of a model that one token uses.

    n_experts, n_experts_used: experts of a layer, in all and per token (the most of all layers);
        0 without experts.
    n_parameters: parameters that one token uses.
    n_bytes: bytes of weights that are read to decode one token.
    """

    n_experts: int
    n_experts_used: int
    n_parameters: int
    n_bytes: int


def active(gguf: GGUF, config: Config) -> Active:
    """Return the active parameters of a file that ``load_config`` has read. Layers for multi-token
    prediction, which follow the last layer, are not counted.
    """
    tables = {*_TABLES}
    if OUTPUT in gguf.tensors or config.main_output != "logits":  # else also the output matrix
        tables.add(EMBEDDINGS)
    n_parameters = n_bytes = 0.0
    for name, tensor in gguf.tensors.items():
        if name in config.ignored:
            continue
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        if layer >= len(config.layers):
            continue
        experts = config.layers[layer].experts
        share = 1.0
        if name in tables or (config.switch and name.endswith((LORA_A, LORA_B))):
            share = 1 / tensor.shape[0]
        elif experts is not None and _EXPERTS in name and tensor.shape[0] in numbers_of(experts):
            share = min(1.0, experts.n_used / tensor.shape[0])
        n_parameters += math.prod(tensor.shape) * share
        n_reads = config.n_loops if name.startswith("blk.") else 1  # weights are read each time
        if config.weights_of and name.startswith("blk."):
            n_reads = config.weights_of.count(layer)
        n_bytes += tensor.n_bytes * share * n_reads
    found = [layer.experts for layer in config.layers if layer.experts is not None]
    n, used = max(((each.n, each.n_used) for each in found), default=(0, 0))
    return Active(n, used, round(n_parameters), round(n_bytes))


def numbers_of(experts: Experts) -> tuple[int, int]:
    """Return how many matrices a tensor of experts may have: (number of experts, number of small
    experts). ``per_chunk`` neighbouring experts share a small one.
    """
    return experts.n, experts.n // experts.per_chunk
