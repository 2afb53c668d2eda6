"""Parts that drafters share which read states between the layers of another model, their target.

A drafter may lack embeddings and an output matrix: it then uses the target's. Its output may have
rows for some of the tokens only; the table ``d2t`` has the token of each row.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treadle.errors import FileError, UnsupportedError
from treadle.models.graphs.decoder import DECODER, TAPPED
from treadle.models.keys import N_LAYER_MAX
from treadle.models.ops import Rows
from treadle.models.structure import TensorRow, check_tensors, find_factors

if TYPE_CHECKING:
    from treadle.files.gguf import GGUF
    from treadle.models.config import Config
    from treadle.models.keys import ArchMetadata
    from treadle.models.ops import Ops
    from treadle.models.structure import Sizes

FEATURES = "features"  # a run's input: states of the model's layers, side by side, of each token
TARGET_LAYERS = "target_layers"
D2T = "d2t"
# Rows of tokens, by which DFlash 2 weighs pairs of neighbours.
PREDECESSOR = "selector_predecessor.weight"
SUCCESSOR = "selector_successor.weight"
READ_BY_HOST = (D2T, PREDECESSOR, SUCCESSOR)
I64 = 27  # ggml's number of the type


def target_layers(keys: ArchMetadata) -> tuple[int, ...]:
    """Return the numbers of the target's layers before which a drafter reads states, or () if the
    file lists none. Raises FileError for a value that is not a list of layers.
    """
    found = keys.get(TARGET_LAYERS)
    if found is None:
        return ()
    if isinstance(found, (str, bytes)) or not hasattr(found, "__len__"):
        keys.fail(TARGET_LAYERS, f"is {found!r:.60}", "a list of layers")
    numbers = [*found]
    for number in numbers:
        if isinstance(number, bool) or not 0 <= number <= N_LAYER_MAX or number != int(number):
            keys.fail(TARGET_LAYERS, f"holds {number!r:.20}", f"layers from 0 to {N_LAYER_MAX}")
    return tuple(map(int, numbers))


def usual_layers(n_layer: int) -> tuple[int, int, int]:
    """Return the three layers of the target before which EAGLE 3 reads states if its file names
    none. ``n_layer``: the target's number of layers.
    """
    return 2, n_layer // 2, n_layer - 3


def n_draft_vocab(keys: ArchMetadata, n_vocab: int) -> int:
    """Return the number of tokens that a drafter can draft, if its file lists them in the table
    ``d2t``; 0 without that table: it can draft all. Raises FileError for more than ``n_vocab``,
    UnsupportedError unless the table has 64-bit integers.
    """
    table = keys.gguf.tensors.get(D2T)
    if table is None:
        return 0
    if len(table.shape) != 1 or not 1 <= table.shape[0] <= n_vocab:
        raise FileError(
            f"has shape {list(table.shape)}",
            path=keys.gguf.path,
            where=D2T,
            expected=f"the tokens of at most {n_vocab}",
        )
    if table.ggml_type != I64:
        raise UnsupportedError(f"{keys.gguf.path}: {D2T}: expected 64-bit integers (I64)")
    return table.shape[0]


def tokens_of(gguf: GGUF, n_vocab: int) -> np.ndarray | None:
    """Return the token id of each column of a drafter's logits, int64 ``[n_logits]``, by the file's
    table ``d2t``; None without that table: columns are then token ids. Raises FileError for an id
    of ``n_vocab`` or more, or one that occurs twice.
    """
    table = gguf.tensors.get(D2T)
    if table is None:
        return None
    tokens = np.frombuffer(table.data.tobytes(), "<i8")
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < n_vocab:
        found = f"holds {tokens[(tokens < 0) | (tokens >= n_vocab)][0]}"
        raise FileError(
            found, path=gguf.path, where=D2T, expected=f"tokens from 0 to {n_vocab - 1}"
        )
    if len(np.unique(tokens)) < len(tokens):
        raise FileError("holds a token twice", path=gguf.path, where=D2T, expected="other tokens")
    return tokens


def bound(config: Config, gguf: GGUF, target: Config, model: GGUF) -> tuple[GGUF, Config]:
    """Return the file and config of a drafter, completed for one model. ``gguf`` and ``config``:
    the drafter's; ``model`` and ``target``: file and config of the model.

    The file gets the model's embeddings and output matrix where it has none, and the config the
    layers whose states are read. The result shares the mappings of both files. Raises
    UnsupportedError if the drafter does not fit this model, FileError for a missing tensor.
    """
    from treadle.models.graphs import GRAPHS

    traits = config.draft
    assert traits is not None

    def refuse(what: str) -> UnsupportedError:
        return UnsupportedError(f"{gguf.path}: cannot draft for {model.path}: {what}")

    if TAPPED not in GRAPHS[target.arch.graph].outputs:
        raise refuse(f"{target.arch.name} has no states between layers that a drafter could read")
    if target.n_embd != config.n_target:
        raise refuse(f"it reads states of {config.n_target} values, the model has {target.n_embd}")
    layers = traits.layers or usual_layers(target.n_layer)
    if not all(0 <= i <= target.n_layer for i in layers):
        raise refuse(f"it reads the states of layers {[*layers]}, the model has {target.n_layer}")
    result = copy.copy(gguf)
    result.tensors = dict(gguf.tensors)
    lent = {"token_embd.weight": model.tensors["token_embd.weight"]}
    own = result.tensors.get("token_embd.weight")
    lent["output.weight"] = model.tensors.get("output.weight", lent["token_embd.weight"])
    for name, tensor in lent.items():
        if name in result.tensors:
            continue
        if tensor.shape[-1] != config.n_embd:
            what = f"has no {name}, and the model's has rows of {tensor.shape[-1]} values"
            raise refuse(f"it {what}, expected {config.n_embd}")
        if name == "output.weight" and config.n_draft_vocab:
            raise refuse(f"it has {D2T} and no output.weight")
        result.tensors[name] = tensor
    n_vocab = result.tensors["token_embd.weight"].shape[0]
    if own is None:
        config = replace(config, n_vocab=n_vocab)
    n_logits = result.tensors["output.weight"].shape[0]
    config = replace(config, draft=replace(traits, layers=tuple(layers)), n_draft_vocab=n_logits)
    config = replace(config, arch=replace(config.arch, lacks=frozenset()))
    optional, ignored = check_tensors(result, GRAPHS[config.arch.graph], config)
    factors, ignored = find_factors(result, config, ignored)
    ignored = (*ignored, *(name for name in READ_BY_HOST if name in result.tensors))
    return result, replace(config, optional=optional, factors=factors, ignored=ignored)


def build_nothing(g: Ops) -> Rows:
    """Return rows of width 0, as the ``Graph.build`` of these drafters: nothing is common to their
    outputs, each of which starts from its own inputs.
    """
    return Rows("", 0)


DRAFT_ROWS = (
    TensorRow(D2T, ("n_draft_vocab",), optional=True),  # the token of each row of logits
    TensorRow("token_embd.weight", ("n_vocab", "n_embd")),
    TensorRow("output_norm.weight", ("n_embd",)),
    TensorRow("output.weight", ("n_logits", "n_embd"), optional=True),  # absent: the model's
    TensorRow("rope_freqs.weight", ("n_rope_freq",), optional=True),
    TensorRow("enc.output_norm.weight", ("n_enc_norm",), optional=True),
    TensorRow("fc.weight", ("n_embd", "n_features")),
)


def sizes_of(config: Config, n_states: int) -> Sizes:
    """Return the sizes named in the shapes of DRAFT_ROWS, by name. ``n_states``: number of the
    target's layers whose states the drafter reads.
    """
    n_features = n_states * config.n_target
    return {
        **DECODER.sizes(config),
        "n_logits": config.n_logits,
        "n_draft_vocab": config.n_draft_vocab,
        "n_features": n_features,
        "n_enc_norm": config.n_embd,
    }
