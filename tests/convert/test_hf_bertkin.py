"""Encoders near BERT: their folders in place and converted, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import TEXTS, save, wordpiece
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.test_rerank import DOCUMENTS, QUERY, theirs
from tests.tiny import rounding
from treadle.convert.hf import open_hf, open_hf_source
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.models.sentence import HEAD_ACTIVATION
from treadle.rerank import Reranker
from treadle.text.tokenizer import load_tokenizer

_ALL = {"num_key_value_heads": 4, "pad_token_id": 0}
_DISTIL = {**_ALL, "hidden_dim": 96}
_ELECTRA = {**_ALL, "embedding_size": 64}
CASES: dict[str, Case] = {
    "distilbert": Case("DistilBert", "bert", _DISTIL, "Model"),
    "distilbert-masked": Case(
        "DistilBert", "bert", {**_DISTIL, "tie_word_embeddings": True}, "ForMaskedLM"
    ),
    "electra": Case("Electra", "bert", _ELECTRA, "Model"),
    "electra-discriminator": Case("Electra", "bert", _ELECTRA, "ForPreTraining"),
    "electra-generator": Case(
        "Electra", "bert", {**_ELECTRA, "tie_word_embeddings": True}, "ForMaskedLM"
    ),
}
SCORING: dict[str, tuple[Case, Callable[[], Any]]] = {
    "distilbert": (
        Case("DistilBert", "bert", {**_DISTIL, "num_labels": 1}, "ForSequenceClassification"),
        wordpiece,
    ),
    "electra": (
        Case("Electra", "bert", {**_ELECTRA, "num_labels": 1}, "ForSequenceClassification"),
        wordpiece,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_states_in_place_and_converted(case: str, tmp_path: Path) -> None:
    """With the bits of any number of threads, alone and beside other texts."""
    model, ids = save(CASES[case], tmp_path / "hf"), prompt()
    expected, bits = compute_logits(getattr(model, model.base_model_prefix, model), ids), []
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as loaded:
                assert loaded.config.ignored == ()
                bits.append(loaded.states(ids))
                error, allowed = worst(bits[-1], expected), rounding(loaded.config)
                assert error <= allowed, (path, error / allowed)
                mean = expected.mean(0) / np.linalg.norm(expected.mean(0))
                vectors = loaded.engine.embed([ids[:7], ids, ids[5:8]])
                assert np.abs(vectors[1] - mean).max() <= 2 * allowed
    assert all(np.array_equal(found, bits[0]) for found in bits)


def score(name: str, folder: Path) -> tuple[Any, Any]:
    """A folder of one that scores; its model in float64, and its tokenizer."""
    case, make = SCORING[name]
    model, tokenizer = save(case, folder), make()
    tokenizer.save(str(folder / "tokenizer.json"))
    return model, tokenizer


@pytest.mark.parametrize("name", SCORING)
def test_scores(name: str, tmp_path: Path) -> None:
    """In place and converted, all pairs in one run."""
    model, tokenizer = score(name, tmp_path / "hf")
    expected = theirs(model, tokenizer, types=name == "electra")
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            ids = [Reranker(loaded).pair(QUERY, document)[0] for document in DOCUMENTS]
            assert ids == [tokenizer.encode(QUERY, document).ids for document in DOCUMENTS]
            found, allowed = loaded.rerank(QUERY, DOCUMENTS), 2 * rounding(loaded.config)
            error = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
            assert error <= allowed, (path, error / allowed)


def rewritten(path: Path, made: Path, **keys: Any) -> Path:
    """The same file with other keys; None takes one away."""
    writer = GGUFWriter(made)
    with open_gguf(path) as file:
        for key, value in (file.metadata | keys).items():
            if value is not None:
                writer.add(key, value)
        for name, tensor in file.tensors.items():
            writer.add_tensor(name, tensor.shape, tensor.ggml_type, tensor.data)
        writer.write()
    return made


def test_what_is_between_the_matrices_of_a_head(tmp_path: Path) -> None:
    """llama.cpp's converter does not say it: a file of DistilBERT is known by its lack of types."""
    score("distilbert", tmp_path / "hf")
    source = open_hf_source(tmp_path / "hf")
    assert [note for note in source.notes if "has relu; llama.cpp has tanh" in note]
    source.close()
    whole = convert(tmp_path / "hf", tmp_path / "whole.gguf")
    found: dict[str | None, Any] = {}
    for said in (None, "relu", "tanh", "gelu_erf", "swish"):
        changes: dict[str, Any] = {HEAD_ACTIVATION: said}
        if said is None:  # nor that the head has the first state
            changes["bert.pooling_type"] = None
        path = rewritten(whole, tmp_path / f"{said}.gguf", **changes)
        with treadle.load(path, threads=1) as model:
            if said == "swish":
                with pytest.raises(UnsupportedError, match="treadle has tanh, relu, gelu_erf"):
                    model.rerank(QUERY, DOCUMENTS)
            else:
                found[said] = model.rerank(QUERY, DOCUMENTS)
    assert np.array_equal(found[None], found["relu"])
    assert not np.allclose(found["relu"], found["tanh"], atol=0.01)
    assert not np.allclose(found["relu"], found["gelu_erf"], atol=0.01)


def test_an_embedder_says_nothing_of_a_head(tmp_path: Path) -> None:
    save(CASES["distilbert"], tmp_path)
    with open_hf(tmp_path) as model:
        assert HEAD_ACTIVATION not in model.metadata
        assert model.metadata["tokenizer.ggml.token_type_count"] == 1
        assert "token_types.weight" not in model.tensors


def test_tensors_by_their_own_names(tmp_path: Path) -> None:
    """What is missing is named as the folder spells it."""
    from safetensors.numpy import load_file, save_file

    for name, lost in (
        ("distilbert", "transformer.layer.1.attention.q_lin.weight"),
        ("distilbert-masked", "distilbert.transformer.layer.1.ffn.lin1.bias"),
        ("electra-discriminator", "electra.encoder.layer.2.output.LayerNorm.weight"),
    ):
        save(CASES[name], tmp_path / name)
        path = tmp_path / name / "model.safetensors"
        tensors = load_file(path)
        del tensors[lost]
        save_file(tensors, path)
        with pytest.raises(FileError, match=lost.replace(".", r"\.")):
            open_hf(tmp_path / name)


def test_narrower_embeddings_are_refused(tmp_path: Path) -> None:
    """ELECTRA small: a matrix makes states of them."""
    save(Case("Electra", "bert", {**_ELECTRA, "embedding_size": 32}, "Model"), tmp_path)
    with pytest.raises(UnsupportedError, match="embedding_size: is 32, and hidden_size 64"):
        open_hf(tmp_path)


@pytest.mark.parametrize("name", ["DistilBertTokenizer", "ElectraTokenizerFast"])
@pytest.mark.parametrize("says", [{}, {"do_lower_case": False}])
def test_their_tokenizers_are_berts(name: str, says: dict[str, bool], tmp_path: Path) -> None:
    """tokenizer_config.json counts before tokenizer.json's normalizer."""
    import transformers

    kind = "electra" if name.startswith("Electra") else "distilbert"
    save(CASES[kind], tmp_path)
    spec = json.loads(wordpiece().to_str())
    spec["normalizer"] |= {"lowercase": "do_lower_case" in says}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    settings = {"tokenizer_class": name, **says}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    texts = [text for text in TEXTS if "[SEP]" not in text]
    with open_hf(tmp_path) as model:
        found = [load_tokenizer(model).encode(text) for text in texts]
    assert found == [tokenizer(text).input_ids for text in texts]
