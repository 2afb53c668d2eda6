"""Gemma 4's assistant: what it drafts is what transformers' drafts, of the model's own keys and
values; texts are those without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import save
from tests.convert.test_hf_gemma4 import case
from tests.models.hf_tiny import _draw, float64_only, run
from tests.spec_decode.tiny_drafters import HOW, Owner, check_texts, either, ids_of, load
from tests.tiny import rounding
from treadle.convert.hf.config import read_config
from treadle.engine.batch import BatchItem
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.kernels.run_state import PAGE, LogitsQuery
from treadle.models.config import Clusters
from treadle.models.graphs.assistant import ORDERING, bound, clustered
from treadle.models.load import load_config
from treadle.selftest import model_check
from treadle.spec_decode.assistant import AssistantDrafter

NAMES = ("gemma4-dense", "gemma4-e", "gemma4-moe")
N_EMBD = 96  # of the assistant: no other size of it
Saved = Callable[[str], tuple[Path, Path, Any, Any]]


def build(target: Any, outer: dict[str, Any] | None = None, **more: Any) -> Any:
    """A random assistant for a model, of its heads' widths; weights are exact in float32."""
    import torch
    import transformers

    cls = transformers.Gemma4AssistantForCausalLM  # imported before float64 is the only float
    kept = ("vocab_size", "sliding_window", "max_position_embeddings", "rms_norm_eps")
    text = {key: getattr(target.config, key) for key in kept}
    text |= {
        "hidden_size": N_EMBD,
        "head_dim": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "global_head_dim": 64,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "pad_token_id": 0,
        **more,
    }
    config = transformers.Gemma4AssistantConfig(
        text_config=text,
        backbone_hidden_size=target.config.hidden_size,
        attn_implementation="eager",
        **(outer or {}),
    )
    with float64_only():
        model = cls(config).eval()
    rng = np.random.default_rng(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = _draw(rng, name, tuple(parameter.shape), True)
            parameter.copy_(torch.from_numpy(drawn.astype(np.float64)))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.from_numpy(1 + 0.2 * rng.standard_normal(1)).float())
            if name.endswith("token_ordering"):
                buffer.copy_(torch.from_numpy(rng.permutation(len(buffer))))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """``saved(name)``: files of a model and of its assistant, and transformers' models."""
    import torch

    made: dict[str, tuple[Path, Path, Any, Any]] = {}
    root = tmp_path_factory.mktemp("assistant")

    def files_of(name: str) -> tuple[Path, Path, Any, Any]:
        if name not in made:
            target = save(case(name), root / name)
            alike: dict[str, Any] = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
            own = build(target, **(alike if name == "gemma4-moe" else {}))
            folder = root / f"{name}-assistant"
            own.to(torch.float32).save_pretrained(folder)
            own.to(torch.float64)
            files = [convert(each, each.with_suffix(".gguf")) for each in (root / name, folder)]
            made[name] = files[0], files[1], target, own
        return made[name]

    return files_of


def drafter_of(model: treadle.Model) -> AssistantDrafter:
    made = model.stepper.scheduler.drafting.drafter
    assert isinstance(made, AssistantDrafter)
    return made


def by_transformers(target: Any, own: Any, ids: list[int], n: int) -> tuple[list[int], np.ndarray]:
    """The ids that it drafts behind ``ids``, and the logits of each, in float64.

    transformers lets a drafted token see two keys more than the window has, which treadle, like
    llama.cpp, counts as the model does.
    """
    import torch

    window = target.config.sliding_window
    own.config.text_config.sliding_window = window - 2
    made = run(target, ids[:-1], output_hidden_states=True, return_shared_kv_states=True)
    state = made.hidden_states[-1][:, -1:]
    token = ids[-1]
    found = []
    drafted = []
    with float64_only(), torch.no_grad():
        for _ in range(n):
            row = target.get_input_embeddings()(torch.tensor([[token]]))
            answer = own(
                inputs_embeds=torch.cat([row, state], -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=made.shared_kv_states,
            )
            logits = answer.logits[0, 0].numpy()
            state = answer.last_hidden_state
            token = int(logits.argmax())
            found.append(logits)
            drafted.append(token)
    own.config.text_config.sliding_window = window
    return drafted, np.array(found)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_transformers(
    name: str, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three requests in one run: one within the window, one that ends at the edge of a page."""
    path, draft, target, own = saved(name)
    texts = [ids_of(2), ids_of(15), ids_of(PAGE + 1, 8)]
    with load(path, draft, kv="f32") as model:
        drafter = drafter_of(model)
        engine = model.engine
        kept: list[np.ndarray] = []
        ask = drafter._ask

        def asked(given: Any) -> Any:
            rows = ask(given)
            kept.append(np.array([row.logits() for row in rows]))
            return rows

        monkeypatch.setattr(drafter, "_ask", asked)
        wanted: dict[Owner, tuple[list[int], int]] = {}
        for ids in texts:
            owner = Owner(engine.cache.sequence())
            part = BatchItem(owner.seq, ids[:-1], 1, (LogitsQuery(first=True),))
            engine.sample([part], drafter.observer)
            assert drafter.can_draft(owner, ids)
            assert not drafter.can_draft(owner, [*ids, 3])  # the model has not run its last but one
            engine.sample([part._replace(ids=[9])], drafter.observer)  # wrong, and taken back
            engine.truncate(owner.seq, len(ids) - 1)
            wanted[owner] = ids, 3
        # A state was lost with the wrong token: the model runs the last but one again.
        for owner, (ids, _) in wanted.items():
            engine.truncate(owner.seq, max(len(ids) - 2, 0))
            part = BatchItem(owner.seq, ids[len(owner.seq) : -1], 1, (LogitsQuery(first=True),))
            engine.sample([part], drafter.observer)
            assert drafter.can_draft(owner, ids)
        made = drafter.draft_ids(wanted)
        for sizes in ((1, 1), (4, 4), (512, 128)):
            drafter.engine.plan(*sizes, "ahead").check()
        allowed = 2 * rounding(model.config)
        for i, (owner, (ids, _)) in enumerate(wanted.items()):
            drafted, exact = by_transformers(target, own, ids, 3)
            found = np.array([rows[i] for rows in kept])
            assert np.abs(found - exact).max() <= allowed * np.abs(exact).max()
            assert made[owner] == drafted
            assert len(owner.seq) == len(ids) - 1  # as it was
            owner.seq.close()


def test_an_output_in_clusters(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of E2B's and E4B's: logits in a token's best clusters, from a folder and a file."""
    import torch

    path, _, target, _ = saved("gemma4-dense")
    outer = {
        "use_ordered_embeddings": True,
        "num_centroids": 5,
        "centroid_intermediate_top_k": 2,
    }
    own = build(target, outer)
    folder = tmp_path / "assistant"
    own.to(torch.float32).save_pretrained(folder)
    own.to(torch.float64)
    ids = ids_of(20)
    drafted, exact = by_transformers(target, own, ids, 4)
    n_rows = 2 * exact.shape[1] // 5
    for draft in (folder, convert(folder, tmp_path / "draft.gguf")):
        with load(path, draft, kv="f32") as model:
            drafter = drafter_of(model)
            kept: list[tuple[np.ndarray, list[int]]] = []
            ask = drafter._ask

            def asked(given: Any, ask: Any = ask, drafter: Any = drafter, kept: Any = kept) -> Any:
                rows = ask(given)
                logits = next(iter(rows)).logits().copy()
                kept.append((logits, [drafter._token_in(0, i) for i in range(len(logits))]))
                return rows

            monkeypatch.setattr(drafter, "_ask", asked)
            owner = Owner(model.engine.cache.sequence())
            part = BatchItem(owner.seq, ids[:-1], 1, (LogitsQuery(first=True),))
            model.engine.sample([part], drafter.observer)
            assert drafter.can_draft(owner, ids)
            assert drafter.draft_ids({owner: (ids, 4)})[owner] == drafted
            for sizes in ((1, 1), (4, 4), (512, 128)):
                drafter.engine.plan(*sizes, "ahead").check()
            for (found, tokens), row in zip(kept, exact, strict=True):
                assert len(set(tokens)) == n_rows == len(found)
                chosen = row > row.min()  # transformers gives all others one less than the least
                assert set(np.flatnonzero(chosen)) <= set(tokens)
                allowed = 2 * rounding(model.config) * np.abs(row).max()
                assert np.abs(found - row[tokens])[chosen[tokens]].max() <= allowed
            owner.seq.close()
            text = model.generate(ids, max_tokens=20, temperature=0, ignore_eos=True)
            text.finish()
            assert text.timings.n_drafted
    with open_gguf(tmp_path / "draft.gguf") as file, open_gguf(path) as of:
        assert file.metadata["gemma4-assistant.centroid_top_k"] == 2
        config = bound(load_config(file), file, load_config(of))
        lost = replace(config, clusters=Clusters(20, 2))  # of 16 rows: all are multiplied
        assert clustered(lost, file)[1].clusters is None
        file.tensors[ORDERING] = replace(
            file.tensors[ORDERING], offset=0, file=np.zeros(8 * 320, np.uint8)
        )
        with pytest.raises(FileError, match="is no order of all tokens"):
            clustered(config, file)
        del file.tensors[ORDERING]
        with pytest.raises(FileError, match="masked_embd_ordering: the tensor is missing"):
            load_config(file)


def test_folders_and_gemma_12b(saved: Saved, tmp_path: Path) -> None:
    """Assistant and model from folders; and in the spelling of the unified model."""
    path, draft, *_ = saved("gemma4-dense")
    asked: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    found = []
    for files in ((path, draft), (path.with_suffix(""), draft.with_suffix(""))):
        with load(*files) as model:
            text = model.generate(ids_of(9), **asked)
            found.append(text.finish())
            assert text.timings.n_drafted
    assert found[0] == found[1]
    config = json.loads((draft.with_suffix("") / "config.json").read_text())
    plain = read_config(config, Path("config.json")).metadata
    config["model_type"] = "gemma4_unified_assistant"
    config["text_config"]["model_type"] = "gemma4_unified_text"
    assert read_config(config, Path("config.json")).metadata == plain
    assert plain["general.architecture"] == "gemma4-assistant"
    assert plain["gemma4-assistant.embedding_length_out"] == 64
    assert plain["gemma4-assistant.nextn_predict_layers"] == 4


@pytest.mark.slow
def test_the_self_test_checks_its_kernels(saved: Saved) -> None:
    """Beside the model's: its batches read keys and values of the model's sequences."""
    path, draft, *_ = saved("gemma4-dense")
    with load(path, draft, n_sequences=4, context=1100) as model:
        report = model_check.CheckReport({}, {}, quick=True)
        model_check.check_kernels(model, report)
        own = drafter_of(model).engine
        assert not len(own.cache.sequence())
        assert all(not pool.reserved for pool in model.engine.cache.pools)
    assert report.passed
    labels = {kernel.label for kernel in report.kernels}
    assert {"nextn.pre_projection", "nextn.post_projection"} <= labels
    assert not any("drafter" in line for line in report.cut)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", NAMES[:2])
def test_the_text_is_that_without_it(name: str, how: dict[str, Any], saved: Saved) -> None:
    """Several at once, longer than the window, one of them behind a beginning that is cached."""
    path, draft, *_ = saved(name)
    check_texts(*either(path, draft), how)


def test_an_assistant_that_is_right_is_believed(saved: Saved, tmp_path: Path) -> None:
    """Of a model whose layers add nothing: then a token alone says which is next."""
    path, draft, *_ = saved("gemma4-dense")
    files = [rewritten(path, tmp_path / "model.gguf"), tmp_path / "draft.gguf"]
    rewritten(draft, files[1], of=files[0])
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
    with load(files[0], files[1]) as model:
        text = model.generate(ids_of(40), **asked)
        found = text.finish()
        assert text.timings.n_accepted > 0.8 * text.timings.n_drafted > 20
    with load(files[0], None) as model:
        assert model.generate(ids_of(40), **asked).finish() == found


def rewritten(path: Path, to: Path, of: Path | None = None) -> Path:
    """A model whose layers add nothing; ``of``: its assistant, which then is as wide as it, and
    takes the embedding to the output as the model does.
    """
    with open_gguf(path) as file:
        tensors = {name: tensor.dequantize() for name, tensor in file.tensors.items()}
        metadata = {key: (file.metadata[key], file.types.get(key)) for key in file.metadata}
    for name in tensors:
        if name.endswith(("post_attention_norm.weight", "post_ffw_norm.weight")):
            tensors[name] = np.zeros_like(tensors[name])
        if name.endswith("layer_output_scale.weight"):
            tensors[name] = np.ones_like(tensors[name])
    if of is not None:
        with open_gguf(of) as model:
            embeddings = model.tensors["token_embd.weight"].dequantize()
            norm = model.tensors["output_norm.weight"].dequantize()
        n = embeddings.shape[1]
        for name, tensor in list(tensors.items()):
            wide = [n if size == N_EMBD else size for size in tensor.shape]
            tensors[name] = np.ones(wide, np.float32)
            if name.endswith(("post_attention_norm.weight", "post_ffw_norm.weight")):
                tensors[name] *= 0
        tensors["token_embd.weight"] = embeddings
        tensors["output_norm.weight"] = norm
        tensors["nextn.pre_projection.weight"] = np.eye(n, 2 * n, dtype=np.float32)
        metadata["gemma4-assistant.embedding_length"] = n, None
    writer = GGUFWriter(to)
    for key, (value, kind) in metadata.items():
        writer.add(key, value if isinstance(value, (str, int, float)) else list(value), kind)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.shape, "F32", np.ascontiguousarray(tensor, np.float32))
    writer.write()
    return to


def test_what_is_refused(saved: Saved, data: Path) -> None:
    _, draft, *_ = saved("gemma4-dense")
    with pytest.raises(UnsupportedError, match=r"gemma4-assistant only drafts .* with --draft"):
        treadle.load(draft)
    with pytest.raises(UnsupportedError, match=r"of a Gemma 4, not of gemma2|need its vocabulary"):
        treadle.load(data / "arch/gemma2.gguf", draft=draft)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n_embd": 96}, "it drafts for states of 64 values, not 96"),
        ({"window": 8}, "its layer 0 has a window of 16 tokens, as none of the model's has"),
        ({"head_dim": 16}, "its layer 0 has 4 heads of 32, the model 2 of 16"),
    ],
)
def test_another_model(change: dict[str, Any], why: str, saved: Saved) -> None:
    path, draft, *_ = saved("gemma4-dense")
    with open_gguf(path) as model, open_gguf(draft) as file:
        target = load_config(model)
        local = {key: n for key, n in change.items() if key != "n_embd"}
        layers = [replace(at, **local) if at.window else at for at in target.layers]
        target = replace(target, n_embd=change.get("n_embd", 64), layers=tuple(layers))
        with pytest.raises(UnsupportedError, match=why):
            bound(load_config(file), file, target)
