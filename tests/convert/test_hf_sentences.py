"""sentence-transformers' folders: the default prompt and the longest text, in place and converted.

The truth is what sentence-transformers does with them: the prompt is joined to the text, both are
tokenized as one, and a text has ``max_seq_length`` tokens at most. It cuts longer ones silently;
treadle refuses them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treadle
from tests.cli.conftest import Run
from tests.cli.conftest import run as run  # a fixture
from tests.convert.test_hf import convert
from tests.convert.test_hf_encoders import CASES, save, wordpiece
from tests.server.conftest import running, talking
from treadle.convert.hf.folder import open_hf
from treadle.convert.hf.sentence_transformers import read_sentences
from treadle.convert.hf.tokenizer.sentence_settings import lower_case
from treadle.errors import ContextFullError, FileError, UnsupportedError
from treadle.models.sentence import MAX_TOKENS, PROMPT

ASK = "the query: "
TEXTS = ["hello worlds", "one more"]


def put(folder: Path, name: str, said: Any) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(said))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "hf"
    save(CASES["bert"], made)
    wordpiece().save(str(made / "tokenizer.json"))
    prompts = {"query": ASK, "document": ""}
    put(
        made,
        "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": "query"},
    )
    put(made, "sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})
    return made


def test_the_default_prompt_goes_before_texts(folder: Path, tmp_path: Path) -> None:
    """Its states are pooled with the others."""
    import torch
    import transformers
    from tokenizers import Tokenizer

    reader = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs = transformers.AutoModel.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        with torch.no_grad():
            states = theirs(torch.tensor([reader.encode(ASK + text).ids])).last_hidden_state[0]
        expected.append(torch.nn.functional.normalize(states.mean(0), dim=0).numpy())
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2, kv="f32") as model:
            found = model.embed(TEXTS)
            assert np.abs(found - np.stack(expected)).max() < 1e-5
            bare = model.embed(TEXTS, default_prompt=False)
            assert np.abs(found - bare).max() > 1e-3
            joined = model.embed([ASK + text for text in TEXTS], default_prompt=False)
            assert np.array_equal(joined, found)


def test_the_longest_text(folder: Path, tmp_path: Path) -> None:
    """It is the context, unless the caller asks for another; learned positions are 512."""
    long = "a " * 60
    for path in (folder, convert(folder, tmp_path / "made.gguf")):
        with treadle.load(path, threads=2) as model:
            assert model.n_ctx == 40
            with pytest.raises(ContextFullError, match="model's max_seq_length of 40"):
                model.embed(long)
        with treadle.load(path, threads=2, context=100) as model:
            assert model.embed(long).shape == (1, 64)


def test_the_command_and_the_server(folder: Path, run: Run) -> None:
    """Ids are taken as they are: nobody knows whether they have a prompt."""
    with treadle.load(folder, threads=2) as model, running(model) as service:
        with_it = model.embed(TEXTS)
        bare = model.embed(TEXTS, default_prompt=False)
        with talking(service) as client:

            def made(**body: Any) -> Any:
                data = client.post("/v1/embeddings", json=body).json()["data"]
                return np.array([row["embedding"] for row in data], np.float32)

            assert np.abs(made(input=TEXTS) - with_it).max() < 1e-6
            assert np.abs(made(input=TEXTS, default_prompt=False) - bare).max() < 1e-6
            ids = [model.tokenize(text) for text in TEXTS]
            assert np.abs(made(input=ids) - bare).max() < 1e-6
            found = client.post("/api/embed", json={"input": TEXTS}).json()["embeddings"]
            assert np.abs(np.array(found, np.float32) - with_it).max() < 1e-6
            too_long = client.post("/v1/embeddings", json={"input": "a " * 60})
            assert "tokens > 40 maximum" in too_long.json()["error"]["message"]
    for options, expected in (((), with_it), (("--no-default-prompt",), bare)):
        ran = run("embed", str(folder), *TEXTS, "-t", "2", *options)
        rows = [line.split() for line in ran.out.splitlines()]
        assert np.abs(np.array(rows, np.float32) - expected).max() < 1e-6


def test_what_names_no_limit(folder: Path) -> None:
    """Then the tokenizer's counts, in a folder of sentence-transformers."""
    put(folder, "sentence_bert_config.json", {"max_seq_length": None})
    put(folder, "tokenizer_config.json", {"model_max_length": 77})
    assert MAX_TOKENS not in read_sentences(folder)
    put(folder, "modules.json", [])
    assert read_sentences(folder)[MAX_TOKENS] == 77
    put(folder, "tokenizer_config.json", {"model_max_length": int(1e30)})
    assert MAX_TOKENS not in read_sentences(folder)


def test_older_names_of_the_file(folder: Path) -> None:
    """The first that is there counts, as in sentence-transformers."""
    put(folder, "sentence_xlnet_config.json", {"max_seq_length": 20})
    put(folder, "sentence_roberta_config.json", {"max_seq_length": 30, "do_lower_case": True})
    assert read_sentences(folder)[MAX_TOKENS] == 40
    (folder / "sentence_bert_config.json").unlink()
    assert read_sentences(folder)[MAX_TOKENS] == 30
    assert lower_case(folder)


@pytest.mark.parametrize("name", ["config_args", "processor_kwargs"])
def test_arguments_beside_the_models_files(folder: Path, name: str) -> None:
    said = {"max_seq_length": 40, name: {"padding_side": "left", "add_eos_token": None}}
    put(folder, "sentence_bert_config.json", said)
    assert read_sentences(folder)[MAX_TOKENS] == 40
    put(folder, "sentence_bert_config.json", {name: {"add_eos_token": True}})
    with pytest.raises(UnsupportedError, match=rf"{name}\.add_eos_token: is True"):
        open_hf(folder)


def test_prompts_that_are_refused(folder: Path) -> None:
    config = "config_sentence_transformers.json"
    for said in ({"prompts": {"query": ASK}}, {"prompts": {"a": ""}, "default_prompt_name": "a"}):
        put(folder, config, said)
        assert PROMPT not in read_sentences(folder)
    put(folder, config, {"prompts": {"query": ASK}, "default_prompt_name": "other"})
    with pytest.raises(FileError, match=r"'other'.*one of prompts: query"):
        open_hf(folder)
    put(folder, config, {"prompts": {"query": ASK}, "default_prompt_name": "query"})
    put(folder, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    with pytest.raises(UnsupportedError, match="include_prompt is false"):
        open_hf(folder)
    put(folder, "1_Pooling/config.json", {"pooling_mode": "mean"})
    put(folder, config, {"prompts": {"query": "[SEP] "}, "default_prompt_name": "query"})
    with treadle.load(folder, threads=2) as model:
        with pytest.raises(UnsupportedError, match="contains a control token"):
            model.embed("hello")
        model.embed("hello", default_prompt=False)
