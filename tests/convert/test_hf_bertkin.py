"""Encoders near BERT: their folders in place and converted, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.api.test_rerank import DOCUMENTS, QUERY, theirs
from tests.changed_gguf import write_changed
from tests.convert.test_hf import convert, prompt, worst
from tests.convert.test_hf_encoders import TEXTS, save, unigram, wordpiece
from tests.models.hf_cases import Case
from tests.models.hf_tiny import compute_logits
from tests.tiny import rounding
from treadle.api.rerank import Reranker
from treadle.convert.hf.config import read_config
from treadle.convert.hf.folder import open_hf, open_hf_source
from treadle.convert.llamacpp_differences import reading_differences
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import open_gguf
from treadle.models.sentence import HEAD_ACTIVATION
from treadle.tokenizer.tokenizer import load_tokenizer

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
_JINA = {"num_key_value_heads": 4, "pad_token_id": 1}
CASES |= {
    "jina-v3": Case("JinaEmbeddingsV3", "jina-bert-v3", _JINA, "Model"),
    "jina-v3-masked": Case(
        "JinaEmbeddingsV3", "jina-bert-v3", {**_JINA, "tie_word_embeddings": True}, "ForMaskedLM"
    ),
}
CASES |= {
    "gte": Case("Gte", "gte", _JINA, "Model"),
    "gte-without-types": Case("Gte", "gte", {**_JINA, "type_vocab_size": 0}, "Model"),
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
    "jina-v3": (
        Case(
            "JinaEmbeddingsV3",
            "jina-bert-v3",
            {**_JINA, "num_labels": 1},
            "ForSequenceClassification",
        ),
        unigram,
    ),
    "gte": (
        Case("Gte", "gte", {**_JINA, "num_labels": 1}, "ForSequenceClassification"),
        unigram,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_states_in_place_and_converted(case: str, tmp_path: Path) -> None:
    """With the bits of any number of threads, alone and beside other texts."""
    model = save(CASES[case], tmp_path / "hf")
    ids = prompt()
    expected = compute_logits(getattr(model, model.base_model_prefix, model), ids)
    bits = []
    for path in (tmp_path / "hf", convert(tmp_path / "hf", tmp_path / "made.gguf")):
        for threads in (1, 2):
            with treadle.load(path, threads=threads, kv="f32") as loaded:
                assert loaded.config.ignored == ()
                bits.append(loaded.states(ids))
                error = worst(bits[-1], expected)
                allowed = rounding(loaded.config)
                assert error <= allowed, (path, error / allowed)
                mean = expected.mean(0) / np.linalg.norm(expected.mean(0))
                vectors = loaded.engine.embed([ids[:7], ids, ids[5:8]])
                assert np.abs(vectors[1] - mean).max() <= 2 * allowed
    assert all(np.array_equal(found, bits[0]) for found in bits)


def score(name: str, folder: Path) -> tuple[Any, Any]:
    """A folder of one that scores; its model in float64, and its tokenizer."""
    case, make = SCORING[name]
    model = save(case, folder)
    tokenizer = make()
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
            found = loaded.rerank(QUERY, DOCUMENTS)
            allowed = 2 * rounding(loaded.config)
            error = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
            assert error <= allowed, (path, error / allowed)


def test_what_is_between_the_matrices_of_a_head(tmp_path: Path) -> None:
    """llama.cpp's converter does not say it: a file of DistilBERT is known by its lack of types."""
    score("distilbert", tmp_path / "hf")
    whole = convert(tmp_path / "hf", tmp_path / "whole.gguf")
    with open_gguf(whole) as file:
        (note,) = reading_differences(file.metadata, file.tensors)
        assert "its scoring head uses tanh; the file says relu" in note
    found: dict[str | None, Any] = {}
    for said in (None, "relu", "tanh", "gelu_erf", "swish"):
        changes: dict[str, Any] = {HEAD_ACTIVATION: said}
        if said is None:  # nor that the head has the first state
            changes["bert.pooling_type"] = None
        path = write_changed(whole, tmp_path / f"{said}.gguf", changes)
        with treadle.load(path, threads=1) as model:
            if said == "swish":
                with pytest.raises(UnsupportedError, match="expected one of tanh, relu, gelu_erf"):
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
    with pytest.raises(UnsupportedError, match="embedding_size: is 32 and hidden_size is 64"):
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


# -- Jina's own spelling -------------------------------------------------------------------------

FLASH = {
    "embeddings.LayerNorm": "emb_ln",
    "attention.self.qkv": "mixer.Wqkv",
    "attention.output.dense": "mixer.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
    "encoder.layer.": "encoder.layers.",
}


def in_flash(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """XLM-RoBERTa's tensors as its second code spells them, behind "roberta."."""
    made = {}
    for name, values in tensors.items():
        if ".self.key" in name or ".self.value" in name:
            continue
        if ".self.query" in name:
            others = (name.replace("query", other) for other in ("key", "value"))
            values = np.concatenate([values, *(tensors[other] for other in others)])
            name = name.replace("query", "qkv")
        for old, new in FLASH.items():
            name = name.replace(old, new)
        made[name if name.startswith(("roberta.", "classifier.")) else f"roberta.{name}"] = values
    return made


def with_tasks(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with five adapters of each matrix, beside which it is called the original."""
    rng = np.random.default_rng(3)
    made = {}
    for name, values in tensors.items():
        if values.ndim < 2:
            made[name] = values
            continue
        at = f"{name.removesuffix('weight')}parametrizations.weight"
        made[f"{at}.original"] = values
        table = "embeddings." in name
        sides = ((len(values), 2), (2, values.shape[1]))
        for one, shape in zip("AB" if table else "BA", sides, strict=True):
            made[f"{at}.0.lora_{one}"] = rng.standard_normal((5, *shape)).astype(np.float32)
    return made


def respell(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))


def test_jina_as_it_was_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With adapters of tasks inside, which are left out: states are those of no task."""
    from safetensors.numpy import load_file

    folder = tmp_path / "hf"
    ids = prompt()
    model = save(CASES["jina-v3"], folder)
    expected = compute_logits(model, ids)
    tensors = load_file(folder / "model.safetensors")
    respell(
        folder,
        with_tasks({f"roberta.{name}": values for name, values in tensors.items()}),
        model_type="xlm-roberta",
        architectures=["XLMRobertaModel"],
        position_embedding_type="rotary",
        rotary_emb_base=20000.0,
        rope_parameters=None,
        lora_adaptations=["retrieval.query", "classification"],
    )
    source = open_hf_source(folder)
    assert sum("left out: embeddings are for no task" in note for note in source.notes) == 1
    source.close()
    open_hf(folder).close()
    assert "one per task, are left out" in caplog.text
    made = convert(folder, tmp_path / "made.gguf")
    with open_gguf(made) as file:
        assert file.metadata["general.architecture"] == "jina-bert-v3"
        assert file.metadata["jina-bert-v3.context_length"] == 126
        assert file.metadata["jina-bert-v3.rope.freq_base"] == 20000.0
        assert "blk.0.attn_qkv.bias" in file.tensors
        assert reading_differences(file.metadata, file.tensors) == []
    for path in (folder, made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert worst(loaded.states(ids), expected) <= rounding(loaded.config)


def in_own_words(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers calls them inside; it writes Jina's names."""
    words = {
        "emb_ln": "embeddings.LayerNorm",
        "encoder.layers": "layers",
        "mixer.out_proj": "self_attn.o_proj",
        "norm1": "post_attention_layernorm",
        "norm2": "post_mlp_layernorm",
    }
    made = {}
    for name, values in tensors.items():
        for old, new in words.items():
            name = name.replace(old, new)
        parts = np.split(values, 3) if "mixer.Wqkv" in name else []
        for one, part in zip("qkv", parts, strict=False):
            made[name.replace("mixer.Wqkv", f"self_attn.{one}_proj")] = part
        if not parts:
            made[name] = values
    return made


def test_jina_in_transformers_own_words(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    save(CASES["jina-v3"], tmp_path / "hf")
    ids = prompt()
    bits = []
    for _ in range(2):
        with treadle.load(tmp_path / "hf", threads=1, kv="f32") as loaded:
            bits.append(loaded.states(ids))
            mixer = loaded.config.layers[0].mixer
        own = in_own_words(load_file(tmp_path / "hf" / "model.safetensors"))
        respell(tmp_path / "hf", own)
    assert mixer == "attention"
    assert np.array_equal(bits[0], bits[1])


def test_a_reranker_in_the_second_spelling(tmp_path: Path) -> None:
    """As jina-reranker-v2: learned positions, and one matrix for queries, keys and values."""
    from safetensors.numpy import load_file

    options = {**_JINA, "type_vocab_size": 1, "num_labels": 1}
    folder = tmp_path / "hf"
    save(Case("XLMRoberta", "bert", options, "ForSequenceClassification"), folder)
    unigram().save(str(folder / "tokenizer.json"))
    with treadle.load(folder, threads=1, kv="f32") as loaded:
        expected = loaded.rerank(QUERY, DOCUMENTS)
    respell(folder, in_flash(load_file(folder / "model.safetensors")))
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=1, kv="f32") as loaded:
            assert loaded.config.layers[0].mixer == "attention_qkv"
            assert np.abs(loaded.rerank(QUERY, DOCUMENTS) - expected).max() < 1e-5


# -- Alibaba's ------------------------------------------------------------------------------------

NTK: dict[str, Any] = {"type": "ntk", "factor": 8.0}


def as_new(folder: Path, **config: Any) -> None:
    """transformers' folder of a GTE as Alibaba's code has it: as gte-multilingual-base."""
    from safetensors.numpy import load_file

    tensors = load_file(folder / "model.safetensors")
    respell(
        folder,
        {f"new.{name}": values for name, values in tensors.items()},
        **{
            "model_type": "new",
            "architectures": ["NewModel"],
            "position_embedding_type": "rope",
            "layer_norm_type": "layer_norm",
            "logn_attention_scale": False,
            "rope_theta": 20000.0,
            "rope_scaling": NTK,
            "rope_parameters": None,
            **config,
        },
    )


def test_gte_as_it_was_published(tmp_path: Path) -> None:
    """Its rope has a larger base, and all pairs turn slower. llama.cpp has no such model."""
    import torch

    folder = tmp_path / "hf"
    ids = prompt()
    model = save(CASES["gte"], folder)
    as_new(folder)
    plain = compute_logits(model, ids)
    base = 20000.0 * NTK["factor"]
    dims = 16
    turns = base ** (-np.arange(0, dims, 2) / dims) / NTK["factor"] ** (2 / dims)
    with torch.no_grad():
        model.rotary_emb.inv_freq.copy_(torch.from_numpy(turns))
    expected = compute_logits(model, ids)
    assert worst(plain, expected) > 0.01  # the test would see it
    made = convert(folder, tmp_path / "made.gguf")
    for path in (folder, made):
        with treadle.load(path, threads=2, kv="f32") as loaded:
            assert loaded.config.ignored == ()
            assert worst(loaded.states(ids), expected) <= rounding(loaded.config)
    with open_gguf(made) as file:
        (note,) = reading_differences(file.metadata, file.tensors)
        assert "llama.cpp has no architecture gte" in note


def test_gte_that_is_refused(tmp_path: Path) -> None:
    save(CASES["gte"], tmp_path / "hf")
    for changes, why in (
        ({"logn_attention_scale": True}, "logn_attention_scale: is True"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type: is 'absolute'"),
        ({"rope_scaling": {**NTK, "mixed_b": 0.6}}, "without mixed_b"),
    ):
        path = tmp_path / "hf" / "config.json"
        before = path.read_text()
        said = {"model_type": "new", "rope_parameters": None, **changes}
        path.write_text(json.dumps({**json.loads(before), **said}))
        with pytest.raises(UnsupportedError, match=why):
            open_hf(tmp_path / "hf")
        path.write_text(before)
    llama = {"model_type": "llama", "rope_scaling": NTK, "hidden_size": 64}
    llama |= {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    with pytest.raises(UnsupportedError, match="'ntk': treadle supports it only in GTE"):
        read_config(llama, Path("config.json"))
