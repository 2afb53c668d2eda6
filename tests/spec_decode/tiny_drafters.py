"""Small random drafters that read states from between a model's layers, as GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import treadle
from tests.models.hf_tiny import byte_vocabulary
from tests.spec_decode.test_draft_model import Always
from tests.tiny import SIZES, draw, write_model
from tests.tiny import keys as usual_keys
from treadle.files.gguf import GGUFWriter
from treadle.models.archs import ARCHS
from treadle.models.graphs import GRAPHS
from treadle.models.graphs.drafters import D2T, I64
from treadle.models.keys import ArchMetadata

N_VOCAB = SIZES["n_vocab"]
N_EMBD = SIZES["n_embd"]
N_LAYER = 6  # of a model
Change = Callable[[dict[str, np.ndarray]], None]


def target(path: Path, arch: str = "llama", **sizes: Any) -> Path:
    """A model to draft for."""
    write_model(path, arch, n_layer=N_LAYER, tied=0, **sizes)
    return path


def write_drafter(
    path: Path,
    arch: str,
    keys: Mapping[str, Any],
    *,
    own: tuple[str, ...] = (),
    n_draft: int = 0,
    n_markov: int = 0,
    vocabulary: bool = True,
    change: Change = lambda tensors: None,
    **sizes: Any,
) -> Path:
    """``keys``: of the architecture, or whole ones with "tokenizer." in front. ``own``: further
    tensors that it has. ``n_draft``: tokens that it drafts, 0 for all.
    """
    size: dict[str, Any] = SIZES | {"n_layer": 1, **sizes}
    made = usual_keys(size) | {key: n for key, n in keys.items() if not key.startswith("tokeni")}
    metadata = {f"{arch}.{key}": value for key, value in made.items()}
    metadata |= {key: value for key, value in keys.items() if key.startswith("tokeni")}
    tensors: dict[str, Any] = {}
    if n_draft:
        tensors[D2T] = SimpleNamespace(shape=(n_draft,), ggml_type=I64)
    if n_markov:
        tensors["markov_w1.weight"] = SimpleNamespace(shape=(size["n_vocab"], n_markov))
        own = (*own, "markov_w1.weight", "markov_w2.weight")
    if arch != "eagle3" and "attn_v.weight" not in keys.get("without", ()):
        tensors["blk.0.attn_v.weight"] = SimpleNamespace(shape=(1, size["n_embd"]))
    file: Any = SimpleNamespace(path=path, metadata=metadata, tensors=tensors)
    row = ARCHS[arch]
    graph = GRAPHS[row.graph]
    config = graph.read(ArchMetadata(file, arch, row.keys), row)
    rng = np.random.default_rng(11)
    found: dict[str, np.ndarray] = {}
    for tensor, places in graph.tensors(config):
        needed = not tensor.optional and tensor.name not in row.lacks
        if needed or tensor.name in row.needs or tensor.name in own:
            found |= {name: draw(rng, name, shape) for name, shape in places.items()}
    change(found)
    writer = GGUFWriter(path)
    writer.add("general.architecture", arch)
    for key, value in metadata.items():
        writer.add(key, value)
    for key, value in byte_vocabulary().items() if vocabulary else ():
        writer.add(f"tokenizer.ggml.{key}", value)
    for name, values in found.items():
        writer.add_tensor(name, values.shape, "F32", np.ascontiguousarray(values, np.float32))
    if n_draft:
        tokens = np.sort(rng.permutation(size["n_vocab"])[:n_draft]).astype("<i8")
        writer.add_tensor(D2T, tokens.shape, I64, tokens.view(np.uint8))
    writer.write()
    return path


def ids_of(n: int, seed: int = 7) -> list[int]:
    """Random tokens."""
    ids: list[int] = np.random.default_rng(seed).integers(3, 250, n).tolist()
    return ids


def load(path: Path, draft: Path | None, **settings: Any) -> treadle.Model:
    """A model whose every step has drafts."""
    given = {"context": 256, "n_sequences": 3, "threads": 1, **settings}
    model = treadle.load(path, draft=draft, **given)
    model.stepper.scheduler.drafting.controller = Always()
    return model
