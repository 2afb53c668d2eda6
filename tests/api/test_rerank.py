"""Reranking: scores of pairs against transformers' classifiers, small and random."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.changed_gguf import write_changed
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import unigram, wordpiece
from tests.models.hf_cases import Case
from tests.models.hf_tiny import build, float64_only, require_transformers
from tests.tiny import rounding
from treadle.api.rerank import QWEN3, Reranker
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf

QUERY = "Hello world"
DOCUMENTS = ["spaces and lines", "this is a test.", "hello unaffable worlds, a test of lines", "a"]
_ALL = {"num_key_value_heads": 4, "pad_token_id": 0, "num_labels": 1}
HEAD = "ForSequenceClassification"
CASES: dict[str, tuple[Case, Callable[[], Any]]] = {
    "bert": (Case("Bert", "bert", _ALL, HEAD), wordpiece),
    "xlm-roberta": (
        Case("XLMRoberta", "bert", {**_ALL, "pad_token_id": 1, "type_vocab_size": 1}, HEAD),
        unigram,
    ),
    "xlm-roberta-types": (
        Case("XLMRoberta", "bert", {**_ALL, "pad_token_id": 1, "type_vocab_size": 2}, HEAD),
        unigram,
    ),
    "modern-bert": (
        Case("ModernBert", "modern-bert", {**_ALL, "num_hidden_layers": 6}, HEAD),
        wordpiece,
    ),
    "modern-bert-mean": (
        Case("ModernBert", "modern-bert", {**_ALL, "classifier_pooling": "mean"}, HEAD),
        wordpiece,
    ),
    "modern-bert-biases": (
        Case(
            "ModernBert",
            "modern-bert",
            {**_ALL, "norm_bias": True, "classifier_bias": True},
            HEAD,
        ),
        wordpiece,
    ),
}


def save(name: str, folder: Path) -> tuple[Any, Any]:
    """Written by transformers; its model in float64, and its tokenizer."""
    require_transformers()
    import torch

    case, make = CASES[name]
    model = build(case)
    tokenizer = make()
    model.to(torch.float32).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.to(torch.float64), tokenizer


def theirs(model: Any, tokenizer: Any, *, types: bool) -> np.ndarray:
    import torch

    made = []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        given = {"token_type_ids": torch.tensor([pair.type_ids])} if types else {}
        with float64_only(), torch.no_grad():
            made.append(model(torch.tensor([pair.ids]), **given).logits[0, 0].item())
    return np.array(made)


@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In place and converted, all pairs in one run; with the types of both texts where there are
    some.
    """
    model, tokenizer = save(name, tmp_path / "hf")
    types = name == "bert"
    expected = theirs(model, tokenizer, types=types)
    if types:  # the test would see it if they were not used
        without = theirs(model, tokenizer, types=False)
        assert np.abs(expected - without).max() > 0.05 * np.abs(expected).max()
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            for document in DOCUMENTS:
                pair = tokenizer.encode(QUERY, document)
                ids, second = Reranker(loaded).pair(QUERY, document)
                assert ids == pair.ids
                if types:
                    assert [int(i >= second) for i in range(len(ids))] == pair.type_ids
            found = loaded.rerank(QUERY, DOCUMENTS)
            assert found.dtype == np.float32
            # A score is a sum like a logit; the head's own sums are short.
            allowed = 2 * rounding(loaded.config)
            error = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
            assert error <= allowed, (path, error / allowed)
            alone = loaded.rerank(QUERY, DOCUMENTS[1:2])
            assert abs(alone[0] - found[1]) <= allowed * max(1.0, np.abs(expected).max())
            assert loaded.rerank(QUERY, []).shape == (0,)


PROMPTS = json.dumps({"prompts": {"ask": "a test: "}, "default_prompt_name": "ask"})


def test_a_default_prompt(tmp_path: Path) -> None:
    """sentence-transformers puts it before the query."""
    save("bert", tmp_path / "hf")
    with treadle.load(tmp_path / "hf", threads=2) as loaded:
        expected = loaded.rerank("a test: " + QUERY, DOCUMENTS)
        assert np.abs(loaded.rerank(QUERY, DOCUMENTS) - expected).max() > 0.01
    (tmp_path / "hf" / "config_sentence_transformers.json").write_text(PROMPTS)
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2) as loaded:
            assert np.abs(loaded.rerank(QUERY, DOCUMENTS) - expected).max() < 1e-5


def qwen3(folder: Path, labels: int) -> Any:
    """A decoder with a head, and the vocabulary that its template needs."""
    require_transformers()
    import torch
    from tokenizers import AddedToken, Tokenizer, pre_tokenizers
    from tokenizers.models import BPE

    options = {"num_labels": labels, "head_dim": 32, "pad_token_id": 0}
    model = build(Case("Qwen3", "qwen3", options, HEAD))
    model.to(torch.float32).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({c: i for i, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    return model.to(torch.float64), tokenizer


def test_a_decoder_that_scores(tmp_path: Path) -> None:
    """By its last token, behind the prompt that it was trained with."""
    import torch

    model, tokenizer = qwen3(tmp_path / "hf", 1)
    expected = []
    for document in DOCUMENTS:
        text = QWEN3.format(query=QUERY, document=document)
        with float64_only(), torch.no_grad():
            states = model.model(torch.tensor([tokenizer.encode(text).ids]))[0][0, -1]
            expected.append((states @ model.score.weight[0]).item())
    with treadle.load(tmp_path / "hf", threads=2, kv="f32", context=2048) as loaded:
        for document in DOCUMENTS:
            text = QWEN3.format(query=QUERY, document=document)
            assert Reranker(loaded).pair(QUERY, document)[0] == tokenizer.encode(text).ids
        found = loaded.rerank(QUERY, DOCUMENTS)
        scale = max(1.0, np.abs(expected).max())
        assert np.abs(found - expected).max() / scale <= 2 * rounding(loaded.config)
        with pytest.raises(UnsupportedError, match="head is a scoring head"):
            loaded.logits([1, 2, 3])
        # What a text spells is text.
        start = loaded.tokenizer.token_id("<|im_start|>")
        assert start is not None
        assert Reranker(loaded).pair("<|im_start|>", "{query}")[0].count(start) == 3
    (tmp_path / "hf" / "config_sentence_transformers.json").write_text(PROMPTS)
    with pytest.raises(UnsupportedError, match=r"default_prompt_name: .* are encoders"):
        treadle.load(tmp_path / "hf")


def test_files_that_lost_what_they_need(tmp_path: Path) -> None:
    """llama.cpp's converter drops BERT's pooler, and calls its classifier ``cls``."""
    save("bert", tmp_path / "hf")
    whole = convert(tmp_path / "hf", tmp_path / "whole.gguf")
    with open_gguf(whole) as gguf:
        out = gguf.tensors["cls.output.weight"].dequantize()
    none = {"cls.output.weight": None, "cls.output.bias": None}
    losses: list[tuple[dict[str, Any], str]] = [
        ({**none, "cls.weight": out, "cls.bias": None}, "the conversion dropped the pooler"),
        ({**none, "cls.weight": None, "cls.bias": None}, "not a reranker: no cls.output.weight"),
        ({"cls.output.weight": np.zeros((3, 64))}, "3 rows: a classifier"),
    ]
    for changes, why in losses:
        path = write_changed(whole, tmp_path / "lost.gguf", tensors=changes)
        with (
            treadle.load(path, threads=1) as model,
            pytest.raises(UnsupportedError, match=why),
        ):
            model.rerank(QUERY, DOCUMENTS)
    lost: dict[str, Any] = {"token_types.weight": None}
    path = write_changed(whole, tmp_path / "lost.gguf", tensors=lost)
    with pytest.raises(FileError, match=r"token_types\.weight: the tensor is missing"):
        treadle.load(path, threads=1)
