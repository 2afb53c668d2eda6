"""Folders of encoders whose scores have numbers added by distance."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.convert.test_hf import convert, keys_of
from tests.convert.test_hf_encoders import TEXTS, put_dense, save
from tests.lowered import lowered
from tests.models.hf_cases import Case
from tests.models.hf_tiny import N_VOCAB, compute_logits, float64_only
from tests.tiny import rounding
from treadle.convert.hf.families.registry import FAMILIES
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.recipe import plan_entries
from treadle.errors import UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.formats import by_name
from treadle.kernels.attention.paged import Attention

LENGTH = 302  # tokens: more than twice the reach of distances, and no multiple of a page
_SIZES = {"num_key_value_heads": 4, "pad_token_id": 1, "max_position_embeddings": LENGTH + 2}
MPNET = Case("MPNet", "mpnet", _SIZES, "Model")
_T5 = {"num_key_value_heads": 4, "d_kv": 32, "d_ff": 96}
T5: dict[str, Case] = {
    "t5": Case("T5", "t5encoder", {**_T5, "feed_forward_proj": "relu"}, "EncoderModel"),
    "t5-gated": Case("T5", "t5encoder", {**_T5, "feed_forward_proj": "gated-gelu"}, "EncoderModel"),
    "mt5": Case("MT5", "t5encoder", _T5, "EncoderModel"),
    "umt5": Case("UMT5", "t5encoder", _T5, "EncoderModel"),
}


def text(n: int = LENGTH, seed: int = 7) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(3, N_VOCAB, n)]


def wordpiece() -> Any:
    """As MPNet's: BERT's words, RoBERTa's tokens around them."""
    from tokenizers import Tokenizer, normalizers, pre_tokenizers, trainers
    from tokenizers.models import WordPiece
    from tokenizers.processors import RobertaProcessing

    made = Tokenizer(WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    made.train_from_iterator(TEXTS * 3, trainer)
    made.post_processor = RobertaProcessing(("</s>", 2), ("<s>", 0), True, False)
    return made


def without_distances(model: Any, ids: list[int]) -> np.ndarray:
    """What transformers computes where no number is added."""
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            parameter.data.zero_()
    return compute_logits(model, ids)


def test_mpnet_in_place(tmp_path: Path) -> None:
    """Alone and beside others, with the bits of any number of threads."""
    model = save(MPNET, tmp_path)
    ids = text()
    expected = compute_logits(model, ids)
    mean = compute_logits(model, ids[:250]).mean(0)
    bits = []
    for threads in (1, 2):
        with treadle.load(tmp_path, threads=threads, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert loaded.engine.cache.n_ctx == LENGTH
            lowered(loaded.engine, 1, 1, "embedding").check()
            found = loaded.states(ids)
            allowed = rounding(loaded.config)
            assert np.abs(found - expected).max() <= allowed * np.abs(expected).max()
            vectors = loaded.engine.embed([ids[:7], ids[:250], ids[5:8]])
            assert np.abs(vectors[1] - mean / np.linalg.norm(mean)).max() <= allowed
            bits.append(found)
    assert np.array_equal(bits[0], bits[1])
    plain = without_distances(model, ids)
    assert np.abs(plain - expected).max() > 100 * allowed * np.abs(expected).max()


def test_mpnet_in_pages_of_16_bits(tmp_path: Path) -> None:
    """Where other encoders' scores are made on matrix registers, these are made in vectors. Keys
    and values lose half a unit of their last place, 2**-11 of them, in each of three layers, whose
    sums may double it.
    """
    model = save(MPNET, tmp_path)
    ids = text()
    expected = compute_logits(model, ids)
    with treadle.load(tmp_path, threads=2, kv="f16") as loaded:
        found = loaded.states(ids)
        specs = [step.spec for step in loaded.plan(LENGTH).match("L0.attn")]
    attention = [spec for spec in specs if isinstance(spec, Attention)]
    assert attention
    assert not any(spec.matrix or spec.words for spec in attention)
    assert np.abs(found - expected).max() <= 3 * 2 * 2.0**-11 * np.abs(expected).max()


def test_sentences_of_mpnet(tmp_path: Path) -> None:
    """A folder of sentence-transformers: its own tokens, the mean of their states, length 1."""
    import torch

    model = save(MPNET, tmp_path)
    wordpiece().save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "MPNetTokenizer", "do_lower_case": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"type": f"sentence_transformers.models.{k}", "path": at} for k, at in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    import transformers

    reader = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [each for each in TEXTS if "</s>" not in each and each]
    with treadle.load(tmp_path, kv="f32") as loaded:
        for each in texts:
            ids = reader(each)["input_ids"]
            assert loaded.tokenizer.encode(each) == ids
            with float64_only(), torch.no_grad():
                mean = model(torch.tensor([ids]))[0][0].mean(0).numpy()
            found = np.array(loaded.embed(each))
            assert np.abs(found - mean / np.linalg.norm(mean)).max() <= rounding(loaded.config)


def test_what_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    save(MPNET, tmp_path)
    with pytest.raises(UnsupportedError, match="mpnet: GGUF has no such architecture"):
        open_hf_source(tmp_path)
    for family in FAMILIES.values():
        assert family.in_place <= (family.arch not in gguf.MODEL_ARCH_NAMES.values())
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    for key in ("relative_attention_num_buckets", "pad_token_id"):
        path.write_text(json.dumps({**said, key: 24}))
        with pytest.raises(UnsupportedError, match=f"{key}: is 24"):
            open_hf(tmp_path)


# -- T5 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", T5)
def test_t5_in_place_and_converted(case: str, tmp_path: Path) -> None:
    """Scores are not divided by the root of head_dim, and neither is what their rounding does."""
    model = save(T5[case], tmp_path / "hf")
    ids = text(200)
    expected = compute_logits(model, ids)
    bits = []
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    for path, threads in ((tmp_path / "hf", 1), (made, 2)):
        with treadle.load(path, threads=threads, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            found = loaded.states(ids)
            allowed = math.sqrt(32) * rounding(loaded.config)
            assert np.abs(found - expected).max() <= allowed * np.abs(expected).max()
            bits.append(found)
    assert np.array_equal(bits[0], bits[1])
    plain = without_distances(model, ids)
    assert np.abs(plain - expected).max() > 100 * allowed * np.abs(expected).max()


@pytest.mark.parametrize("case", ["t5", "umt5"])
def test_what_is_written_of_t5(case: str, tmp_path: Path) -> None:
    """The names that the gguf package lists; numbers by distance stay F32."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.T5ENCODER
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[arch]}
    save(T5[case], tmp_path / "hf")
    with open_gguf(convert(tmp_path / "hf", tmp_path / "made.gguf")) as file:
        assert file.metadata["general.architecture"] == gguf.MODEL_ARCH_NAMES[arch]
        count = gguf.Keys.Attention.REL_BUCKETS_COUNT.format(arch="t5encoder")
        assert file.metadata[count] == 32
        for name in file.tensors:
            stem = re.sub(r"\.\d+\.", ".{bid}.", name.removesuffix(".weight"))
            assert stem in known, name
        own = [name for name in file.tensors if "attn_rel_b" in name]
        assert own == [f"enc.blk.{i}.attn_rel_b.weight" for i in range(3 if case == "umt5" else 1)]
    source = open_hf_source(tmp_path / "hf")
    found = {e.tensor.name: e.type.name for e in plan_entries(source, by_name("Q8_0"))}
    source.close()
    assert found["enc.blk.0.attn_o.weight"] == "Q8_0"
    assert {found[name] for name in own} == {"F32"}


def t5_unigram() -> Any:
    """As T5's: an end, and no beginning."""
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    from tokenizers.models import Unigram
    from tokenizers.processors import TemplateProcessing

    made = Tokenizer(Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>")
    made.train_from_iterator(TEXTS * 3, trainer)
    made.post_processor = TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return made


def test_sentences_of_t5(tmp_path: Path) -> None:
    """sentence-t5: a matrix behind the mean. A file that does not say so ends texts too, as in
    llama.cpp.
    """
    model = save(T5["t5"], tmp_path / "hf")
    reader = t5_unigram()
    (matrix,) = put_dense(tmp_path / "hf", (48, 64))
    reader.save(str(tmp_path / "hf" / "tokenizer.json"))
    made = convert(tmp_path / "hf", tmp_path / "made.gguf")
    flags = "tokenizer.ggml.add_bos", "tokenizer.ggml.add_eos"
    silent = tmp_path / "silent.gguf"
    write_changed(made, silent, without=lambda name: name.startswith(flags))
    ids = reader.encode(TEXTS[0]).ids
    assert ids[-1] == 1
    expected = compute_logits(model, ids).mean(0) @ matrix.T
    expected /= np.linalg.norm(expected)
    for path in (tmp_path / "hf", made, silent):
        with treadle.load(path, kv="f32") as loaded:
            assert loaded.tokenizer.encode(TEXTS[0]) == ids
            found = np.array(loaded.embed(TEXTS[0]))
            allowed = math.sqrt(32) * rounding(loaded.config)
            assert np.abs(found - expected).max() <= 2 * allowed


@pytest.mark.parametrize("name", ["T5", "MT5", "UMT5"])
def test_defaults_of_t5(name: str) -> None:
    import transformers

    left_out = {"model_type": name.lower(), "architectures": [f"{name}EncoderModel"]}
    full = getattr(transformers, f"{name}Config")().to_dict()
    assert keys_of(left_out) == keys_of({**full, **left_out})
    assert keys_of(left_out)["general.architecture"] == "t5encoder"


def test_what_is_refused_of_t5() -> None:
    encoder = {"model_type": "t5", "architectures": ["T5EncoderModel"]}
    for key, value in (
        ("relative_attention_max_distance", 64),
        ("feed_forward_proj", "gated-silu"),
    ):
        with pytest.raises(UnsupportedError, match=key):
            keys_of({**encoder, key: value})
