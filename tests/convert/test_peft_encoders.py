"""Adapters of encoders: by transformers' own names, of embeddings, and those of Jina's tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_bertkin import CASES as KIN
from tests.convert.test_hf_bertkin import in_own_words, respell, with_tasks
from tests.convert.test_hf_encoders import CASES, save
from tests.convert.test_peft_modules import write_merged
from tests.loras import write_peft
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.tiny import rounding
from treadle.cli import main
from treadle.convert.lora.lora import open_adapter
from treadle.errors import FileError
from treadle.files.gguf import open_gguf
from treadle.models.load import load_config

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
GATED = (*MODULES, "up_proj", "gate_proj", "down_proj")
OWN = {  # what is one matrix in files, and several modules
    "nomic-bert": (CASES["nomic-bert"], GATED),
    "jina-v3": (KIN["jina-v3"], (*MODULES, "fc1", "fc2")),
    "gte": (KIN["gte"], ("q_proj", "v_proj", "down_proj")),  # none of k's
}


@pytest.mark.parametrize("name", OWN)
def test_own_names(name: str, tmp_path: Path) -> None:
    case, kinds = OWN[name]
    model = save(case, tmp_path / "hf")
    ids = prompt()
    bare = compute_logits(model, ids)
    adapter = write_merged(model, kinds, tmp_path / "lora")
    expected = compute_logits(model, ids)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=1, kv="f32", lora=[adapter]) as loaded:
            bound = rounding(loaded.config)
            assert worst(bare, expected) > 100 * bound
            assert worst(loaded.states(ids), expected) <= 2 * bound


def test_one_module_of_three_matrices(tmp_path: Path) -> None:
    """A's of the first code's ``Wqkv``, where a folder has q, k and v apart."""
    from safetensors.numpy import load_file

    save(KIN["jina-v3"], tmp_path / "hf")
    rng = np.random.default_rng(3)
    ids = prompt()
    states = []
    shapes = {"A": (4, 64), "B": (192, 4)}
    at = "base_model.model.roberta.encoder.layers.1.mixer.Wqkv.lora_"
    tensors = {f"{at}{side}.weight": rng.standard_normal(n) / 8 for side, n in shapes.items()}
    adapter = write_peft(tmp_path / "lora", tensors)
    for _ in range(2):
        with treadle.load(tmp_path / "hf", threads=1, kv="f32", lora=[adapter]) as loaded:
            states.append(loaded.states(ids))
        own = in_own_words(load_file(tmp_path / "hf" / "model.safetensors"))
        respell(tmp_path / "hf", own)
    assert worst(states[0], states[1]) <= rounding(loaded.config)


def test_what_nobody_reads(tmp_path: Path) -> None:
    """The pooler, which PEFT's "all-linear" has too, makes no states."""
    model = save(CASES["bert"], tmp_path / "hf")
    ids = prompt()
    adapter = write_merged(model, ("query", "dense"), tmp_path / "lora")
    tensors = (adapter / "adapter_model.safetensors").read_bytes()
    assert b"base_model.model.pooler.dense" in tensors
    with treadle.load(tmp_path / "hf", threads=1, kv="f32", lora=[adapter]) as loaded:
        bound = 2 * rounding(loaded.config)
        assert worst(loaded.states(ids), compute_logits(model, ids)) <= bound


def embeddings_merged(model: Any, tables: tuple[str, ...], folder: Path, seed: int = 3) -> Path:
    """An adapter of tables that tokens read rows of, as PEFT has them, merged into ``model``."""
    import torch

    rng = np.random.default_rng(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not name.endswith(tables):
            continue
        n, k = module.weight.shape
        a = rng.standard_normal((3, n)).astype(np.float32)
        b = rng.standard_normal((k, 3)).astype(np.float32)
        for side, half in (("A", a), ("B", b)):
            tensors[f"base_model.model.{name}.lora_embedding_{side}"] = half
        with torch.no_grad():
            module.weight += torch.from_numpy(2.0 * (b.astype(np.float64) @ a).T)
    assert len(tensors) == 2 * len(tables)
    return write_peft(folder, tensors, r=3, lora_alpha=6)


def test_embeddings(tmp_path: Path) -> None:
    """Of tokens, and the one type that all of them get, beside a second adapter; as PEFT's folder,
    as a GGUF file, and in the weights.
    """
    model = save(KIN["jina-v3"], tmp_path / "hf")
    ids = prompt()
    base = convert(tmp_path / "hf", tmp_path / "made.gguf")
    other = embeddings_merged(model, ("word_embeddings",), tmp_path / "other", 4)
    once = compute_logits(model, ids)
    both = ("word_embeddings", "token_type_embeddings")
    adapter = embeddings_merged(model, both, tmp_path / "lora")
    expected = compute_logits(model, ids)
    file = tmp_path / "lora.gguf"
    assert main(["convert", str(adapter), str(file), "--base", str(base)]) == 0
    given = [str(other), str(file)]
    merged = ["quantize", str(base), str(tmp_path / "merged.gguf"), "F32"]
    assert main([*merged, *(word for each in given for word in ("--lora", each))]) == 0
    for path in (tmp_path / "hf", base):
        for second in (adapter, file):
            lora = [(other, 1.0), (second, 0.0)]
            with treadle.load(path, threads=2, kv="f32", lora=lora) as loaded:
                bound = 2 * rounding(loaded.config)
                assert worst(loaded.states(ids), once) <= bound
            with treadle.load(path, threads=1, kv="f32", lora=[other, second]) as loaded:
                assert worst(loaded.states(ids), expected) <= bound
    with treadle.load(tmp_path / "merged.gguf", threads=1, kv="f32") as loaded:
        assert worst(loaded.states(ids), expected) <= bound


def test_embeddings_that_are_the_output_matrix_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As PEFT has it, an adapter of the first is none of the second; weights would be of both."""
    import torch

    case = Case("Gemma", "gemma", {"head_dim": 32, "tie_word_embeddings": True})
    model = save(case, tmp_path / "hf")
    ids = prompt()
    base = convert(tmp_path / "hf", tmp_path / "made.gguf")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    adapter = embeddings_merged(model, ("embed_tokens",), tmp_path / "lora")
    expected = compute_logits(model, ids)
    for path in (tmp_path / "hf", base):
        with treadle.load(path, threads=1, kv="f32", lora=[adapter]) as loaded:
            assert worst(loaded.logits(ids), expected) <= 2 * rounding(loaded.config)
    words = ["quantize", str(base), str(tmp_path / "q.gguf"), "F32", "--lora", str(adapter)]
    assert main(words) == 1
    assert "the output matrix shares these weights" in capsys.readouterr().err


def test_tasks_of_jina(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is called as if it were a file in the folder; llama.cpp's converter writes such a file
    of it.
    """
    from safetensors.numpy import load_file

    folder = tmp_path / "hf"
    ids = prompt()
    model = save(KIN["jina-v3"], folder)
    tensors = load_file(folder / "model.safetensors")
    tasks = ["retrieval.query", "classification", "three", "four", "five"]
    made = with_tasks({f"roberta.{name}": values for name, values in tensors.items()})
    respell(
        folder,
        made,
        model_type="xlm-roberta",
        position_embedding_type="rotary",
        rotary_emb_base=20000.0,
        rope_parameters=None,
        lora_adaptations=tasks,
        lora_alpha=0.5,
    )
    bare = compute_logits(model, ids)
    import torch

    own = model.state_dict()
    i = tasks.index("classification")
    for name, values in tensors.items():
        if values.ndim < 2 or "pooler" in name:
            continue
        at = f"roberta.{name.removesuffix('weight')}parametrizations.weight.0.lora_"
        halves = [made[f"{at}{side}"][i].astype(np.float64) for side in "BA"]
        change = halves[1] @ halves[0] if "embeddings." in name else halves[0] @ halves[1]
        merged = {name: torch.from_numpy(values + 0.25 * change)}
        with torch.no_grad():
            for theirs, matrix in in_own_words({k: v.numpy() for k, v in merged.items()}).items():
                own[theirs].copy_(torch.from_numpy(matrix))
    expected = compute_logits(model, ids)
    task = folder / "classification"
    base = convert(folder, tmp_path / "base.gguf")
    file = tmp_path / "task.gguf"
    assert main(["convert", str(task), str(file), "--base", str(base)]) == 0
    for path in (folder, base):
        for adapter in (task, file):
            with treadle.load(path, threads=1, kv="f32", lora=[adapter]) as loaded:
                bound = 2 * rounding(loaded.config)
                assert worst(bare, expected) > 100 * bound
                assert worst(loaded.states(ids), expected) <= bound
                assert [each.name for each in loaded.engine.adapters] == [adapter.stem]
    with open_gguf(file) as written, open_gguf(base) as gguf:
        assert written.metadata["adapter.lora.task_name"] == "classification"
        shapes = {name: tensor.shape for name, tensor in written.tensors.items()}
        for name, shape in (("token_embd", (320, 2)), ("token_types", (2, 64))):
            assert shapes[f"{name}.weight.lora_a"] == shape
        assert shapes["token_embd.weight.lora_b"] == (64, 2)
        assert shapes["token_types.weight.lora_b"] == (1, 2)
        with pytest.raises(FileError, match=r"no adapter for a task 'three.gguf'.*classification"):
            open_adapter(folder / "three.gguf", gguf, load_config(gguf))
    capsys.readouterr()
    assert main(["convert", str(task), str(file), "--force"]) == 2
    assert "--base MODEL" in capsys.readouterr().err
