"""Small random drafters that read states from between a model's layers, as GGUF files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import treadle
from tests.models.hf_tiny import byte_vocabulary
from tests.reference import fed, mixed, tensor_of
from tests.spec_decode.test_draft_model import Always
from tests.tiny import SIZES, draw, write_model
from tests.tiny import keys as usual_keys
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kvcache.cache import Sequence
from treadle.models.archs import ARCHS, Arch
from treadle.models.drafters.dflash import SELECTOR
from treadle.models.drafters.target import D2T, I64, PREDECESSOR, SUCCESSOR
from treadle.models.graphs import GRAPHS
from treadle.models.keys import ArchMetadata

N_VOCAB = SIZES["n_vocab"]
N_EMBD = SIZES["n_embd"]
N_LAYER = 6  # of a model
SELECTOR_TENSORS = (PREDECESSOR, SUCCESSOR, f"{SELECTOR}.weight")
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
    wrong: Mapping[str, Any] | None = None,
    n_draft: int = 0,
    n_markov: int = 0,
    n_selector: int = 0,
    vocabulary: bool = True,
    alone: bool = False,
    change: Change = lambda tensors: None,
    row: Arch | None = None,
    **sizes: Any,
) -> Path:
    """``row``: in place of the architecture's. ``keys``: of the architecture, or whole ones with
    "tokenizer." in front. ``own``: further tensors that it has. ``wrong``: keys that its tensors
    know nothing of. ``n_selector``: rank of a selector. ``n_draft``: tokens that it drafts, 0 for
    all. ``alone``: keys are values as well.
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
    if n_selector:
        own = (*own, *SELECTOR_TENSORS)
    for name in (*own, *(() if alone else ("blk.0.attn_v.weight",))):
        tensors.setdefault(name, SimpleNamespace(shape=(size["n_vocab"], size["n_embd"])))
    file: Any = SimpleNamespace(path=path, metadata=metadata, tensors=tensors)
    row = row or ARCHS[arch]
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
    for key, value in (metadata | {f"{arch}.{k}": n for k, n in (wrong or {}).items()}).items():
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


HOW: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.3, "seed": 5}]


Open = Callable[..., treadle.Model]  # with settings of ``treadle.load``


def either(path: Path, draft: Path) -> tuple[Open, Open]:
    """The model alone, and with its drafter."""
    return partial(load, path, None), partial(load, path, draft)


def check_texts(alone: Open, drafted: Open, how: dict[str, Any]) -> treadle.Generation:
    """Check that texts are those without the drafter: several at once, one of them behind a
    beginning that the cache knows. Return the first, with drafts.
    """
    prompts = [ids_of(5), ids_of(70), [*ids_of(64), 9, 8]]
    made = []
    for opened in (alone, drafted):
        with opened(deterministic=True) as model:
            model.generate(prompts[1], max_tokens=3).finish()
            texts = [model.generate(ids, max_tokens=60, ignore_eos=True, **how) for ids in prompts]
            for text in texts:
                text.begin(look_ahead=float("inf"))
            made.append([(text.finish(), text.ids) for text in texts])
        assert any(text.timings.n_drafted for text in texts) == (opened is drafted)
    assert made[0] == made[1]
    return texts[0]


def check_session(alone: Open, drafted: Open, least: int = 0) -> None:
    """The same of a session that is cut and forked; ``least``: drafts that are accepted in each."""
    made = []
    for opened in (alone, drafted):
        with opened(deterministic=True) as model:
            session = model.session()
            asked: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": True}
            texts = [model.generate(ids_of(40), session=session, **asked)]
            texts[0].finish()
            session.truncate(33)
            fork = model.session()
            fork.seq = model.engine.cache.fork(session.seq)
            for other, more in ((session, ids_of(9, 1)), (fork, ids_of(9, 2))):
                texts.append(model.generate([*other.ids, *more], session=other, **asked))
                texts[-1].finish()
            made.append([text.ids for text in texts])
            if opened is drafted:
                assert all(text.timings.n_drafted for text in texts)
                assert all(text.timings.n_accepted >= least for text in texts)
            session.close()
            fork.close()
    assert made[0] == made[1]


def adds_nothing(path: Path, to: Path) -> Path:
    """A model whose layers add nothing: a token says alone which is next."""
    with open_gguf(path) as file:
        writer = GGUFWriter(to)
        for key, value in file.metadata.items():
            given = value if isinstance(value, (str, int, float)) else list(value)
            writer.add(key, given, file.types.get(key))
        for name, tensor in file.tensors.items():
            data = tensor.data.copy()
            if "attn_output" in name or "ffn_down" in name:
                data[:] = 0
            writer.add_tensor(name, tensor.shape, tensor.ggml_type, data)
        writer.write()
    return to


class Owner:
    """The part of a request that a drafter reads."""

    def __init__(self, seq: Sequence) -> None:
        self.seq = seq


def states_before(model: treadle.Model, ids: list[int], layers: tuple[int, ...]) -> np.ndarray:
    """The states of a model before some layers, side by side, in float64."""
    tensor = tensor_of(model.gguf)
    x = tensor("token_embd.weight")[ids] * model.config.embd_scale
    found = [x]
    for i in range(model.config.n_layer):
        x = fed(model.config, i, mixed(model.config, i, x, tensor, kept={}), tensor)
        found.append(x)
    return np.concatenate([found[i] for i in layers], 1)
