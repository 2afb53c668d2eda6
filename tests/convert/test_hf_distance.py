"""Folders of encoders whose scores have numbers added by distance."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf_encoders import TEXTS, save
from tests.models.hf_cases import Case
from tests.models.hf_tiny import N_VOCAB, compute_logits, float64_only
from tests.tiny import rounding
from treadle.convert.hf import open_hf, open_hf_source
from treadle.convert.hf_families import FAMILIES
from treadle.errors import UnsupportedError
from treadle.kernels.attention import Attention

LENGTH = 302  # tokens: more than twice the reach of distances, and no multiple of a page
_SIZES = {"num_key_value_heads": 4, "pad_token_id": 1, "max_position_embeddings": LENGTH + 2}
MPNET = Case("MPNet", "mpnet", _SIZES, "Model")


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
    model, ids = save(MPNET, tmp_path), text()
    expected, mean = compute_logits(model, ids), compute_logits(model, ids[:250]).mean(0)
    bits = []
    for threads in (1, 2):
        with treadle.load(tmp_path, threads=threads, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert loaded.engine.cache.n_ctx == LENGTH
            loaded.engine.plan(1, 1, "embedding").check()
            found, allowed = loaded.states(ids), rounding(loaded.config)
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
    model, ids = save(MPNET, tmp_path), text()
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
    with pytest.raises(UnsupportedError, match="mpnet: GGUF has no architecture for it"):
        open_hf_source(tmp_path)
    for family in FAMILIES.values():
        assert family.in_place <= (family.arch not in gguf.MODEL_ARCH_NAMES.values())
    path = tmp_path / "config.json"
    said = json.loads(path.read_text())
    for key in ("relative_attention_num_buckets", "pad_token_id"):
        path.write_text(json.dumps({**said, key: 24}))
        with pytest.raises(UnsupportedError, match=f"{key}: is 24"):
            open_hf(tmp_path)
