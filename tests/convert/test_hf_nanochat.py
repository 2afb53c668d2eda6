"""NanoChat: transformers' folders and mlx-lm's, in place and converted, its words and its chat."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.hf_tokenizers import byte_level, save, split
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_kin import renamed, saved
from tests.loras import draw_pairs, write_peft
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits, require_transformers
from tests.models.test_arch_truth import check_truth, ids_of
from tests.tiny import rounding, write_model
from treadle.chat.template.template import load_template
from treadle.convert.hf.folder import open_hf
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.tokenizer.tokenizer import load_tokenizer

CASE = Case("NanoChat", "nanochat", {"hidden_act": "relu2", "final_logit_softcapping": 5.0})
# The norms behind the rope take YaRN's factor away.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32}
MORE: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
    "yarn": {"rope_parameters": YARN, "final_logit_softcapping": None},
}
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
CONTROLS = ["<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>"]
CONTROLS += ["<|assistant_end|>", "<|python_start|>", "<|python_end|>"]


def test_in_every_way(tmp_path: Path) -> None:
    model = saved(CASE, tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    check_truth(made, compute_logits(model, ids_of()))
    with treadle.load(made, threads=1) as loaded:
        (note,) = reading_differences(loaded.gguf.metadata, loaded.gguf.tensors)
        assert "llama.cpp has no architecture nanochat" in note
        assert not any("norm" in name for name in loaded.gguf.tensors)


@pytest.mark.parametrize("more", MORE)
def test_in_place_and_converted(more: str, tmp_path: Path) -> None:
    case = Case("NanoChat", "nanochat", {**CASE.options, **MORE[more]})
    model = saved(case, tmp_path / "hf")
    expected = compute_logits(model, prompt())
    for each in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(each, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            error = worst(loaded.logits(prompt()), expected)
            assert error <= rounding(loaded.config), (each, error / rounding(loaded.config))


def test_names_of_its_own_code_and_adapters(tmp_path: Path) -> None:
    """As mlx-lm spells it: the same logits, with an adapter too, which PEFT names as
    transformers does.
    """
    from safetensors.numpy import load_file, save_file

    saved(CASE, tmp_path / "hf")
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    pairs = draw_pairs(made, 4, 4, ("attn_q", "ffn_up"))
    peft = {}
    for stem, pair in pairs.items():
        module = "self_attn.q_proj" if "attn_q" in stem else "mlp.fc1"
        for side, matrix in zip("AB", pair, strict=True):
            name = f"base_model.model.model.layers.{stem.split('.')[1]}.{module}.lora_{side}.weight"
            peft[name] = matrix
    adapter = write_peft(tmp_path / "peft", peft)
    found = []

    def compute() -> None:
        for each in (tmp_path / "hf", made):
            for lora in ([], [adapter]):
                with treadle.load(each, threads=1, kv="f32", lora=lora) as loaded:
                    found.append(loaded.logits(prompt()))

    compute()
    path = tmp_path / "hf" / "model.safetensors"
    words = [("model.layers", "transformer.h"), ("model.embed_tokens", "transformer.wte")]
    words += [(f"self_attn.{x}_proj", f"attn.c_{x}") for x in "qkv"]
    words += [("self_attn.o_proj", "attn.c_proj"), ("mlp.fc1", "mlp.c_fc"), ("fc2", "c_proj")]
    tensors = renamed(load_file(path), *words)
    assert "transformer.h.0.mlp.c_proj.weight" in tensors
    save_file(tensors, path)
    compute()
    plain, adapted, *_ = found
    assert worst(adapted, plain) > 0.01
    for at, logits in enumerate(found):
        assert np.array_equal(logits, found[at % 2]), at


def test_what_files_leave_unsaid(tmp_path: Path) -> None:
    write_model(tmp_path / "x.gguf", "nanochat")
    with treadle.load(tmp_path / "x.gguf", threads=1) as model:
        assert model.config.logit_softcap == 15.0
        inverse, factor = model.config.ropes[0].frequencies()
        assert (inverse[0], factor) == (-1.0, 1.0)
        labels = [step.label for step in model.plan(1).steps]
    assert labels[:2] == ["token_embd", "token_embd_norm"]


def test_later_versions_are_refused(tmp_path: Path) -> None:
    name = "blk.0.nanochat_resid_lambdas.weight"
    write_model(tmp_path / "x.gguf", "nanochat", others={name: (4,)})
    with pytest.raises(UnsupportedError, match=f"{name}: belongs to a later NanoChat"):
        treadle.load(tmp_path / "x.gguf")
    saved(CASE, tmp_path / "hf")
    from safetensors.numpy import load_file, save_file

    path = tmp_path / "hf" / "model.safetensors"
    save_file({**load_file(path), "model.resid_lambdas": np.ones(3, np.float32)}, path)
    with pytest.raises(
        FileError, match=r"model\.resid_lambdas: is not a tensor of a nanochat model"
    ):
        open_hf(tmp_path / "hf")


@pytest.mark.parametrize("whole", [True, False])
def test_words_and_chat(whole: bool, tmp_path: Path) -> None:
    """As transformers makes tokenizer.json of tiktoken's ranks: a piece is taken whole."""
    require_transformers()
    from tokenizers import Tokenizer, decoders, models, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(split(PATTERN))
    tokenizer.decoder = decoders.ByteLevel()
    text = "the model's 1234567 words don't end, and 12 of them're here\n\n  or 3 there!!\n"
    letters = byte_level().alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    tokenizer.add_special_tokens(CONTROLS)
    theirs = save(tokenizer, tmp_path, bos_token="<|bos|>")
    path = tmp_path / "tokenizer.json"
    said = json.loads(path.read_text("utf-8"))
    said["model"]["ignore_merges"] = whole
    path.write_text(json.dumps(said), "utf-8")

    from treadle.convert.hf.tokenizer.tokenizer import read_tokenizer

    keys = read_tokenizer(tmp_path, {"eos_token_id": 1}, 330)
    file: Any = SimpleNamespace(path=tmp_path, metadata=keys)
    ours = load_tokenizer(file)
    assert ours.pre == "nanochat"
    for each in (text, "123 I'VE  x\u0301 漢字12345\r\n\t!?", "<|bos|>the<|user_end|>"):
        assert ours.encode(each, special=True) == theirs(each)["input_ids"]
    assert ours.encode("<|assistant_end|>", special=True)[0] in ours.eog
    template = load_template(file, "nanochat")
    turns = ["one", "two", "three"]
    messages = [{"role": "system", "content": "Be brief."}]
    messages += [
        {"role": role, "content": turn}
        for role, turn in zip(("user", "assistant", "user"), turns, strict=True)
    ]
    assert template.builtin == "nanochat"
    assert template.render(messages) == (
        "<|bos|><|user_start|>Be brief.\n\none<|user_end|><|assistant_start|>two<|assistant_end|>"
        "<|user_start|>three<|user_end|><|assistant_start|>"
    )
    assert load_template(file, "apertus").builtin == "plain"
