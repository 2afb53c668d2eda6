"""Scores of a tiny random model equal those of lm-eval's own ``hf`` on the same folder."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["HF_DATASETS_OFFLINE"] = "1"  # read as datasets is imported
os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
import torch
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import treadle
from lm_eval_treadle import TreadleLM
from lm_eval_treadle.model import read_sampling

N_CTX = 96
TEXT = (
    "the cat sat on the mat and the dog ran over the hill while a red bird sang of green grass "
    "in the morning sun, and nobody knew why the old clock had stopped at nine"
)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if not loop.last or m.role != 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHOICES = """
task: tiny_choices
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """
task: tiny_rolling
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
WRITTEN = """
task: tiny_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: [" the", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of transformers: a random Llama whose logits differ much, a BPE tokenizer with BOS,
    a chat template; beside it the tasks and their documents.
    """
    path = tmp_path_factory.mktemp("tiny")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    bos = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.post_processor = bos
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(path)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=N_CTX,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    rng = np.random.default_rng(3)
    words = TEXT.split()

    def some(n: int) -> str:
        return " ".join(rng.choice(words, n))

    documents = [
        {
            "question": some(6),
            "choices": [f" {some(n)}" for n in (1, 2, 3, 5)],
            "answer": int(rng.integers(4)),
            "text": some(8 if i % 2 else 60),  # several windows
        }
        for i in range(8)
    ]
    file = path / "documents.json"
    file.write_text("\n".join(map(json.dumps, documents)))
    for task in (CHOICES, ROLLING, WRITTEN):
        name = task.split()[1]
        (path / f"{name}.yaml").write_text(task.replace("FILE", str(file)))
    return path


@pytest.fixture(scope="module")
def tasks(folder: Path) -> TaskManager:
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[TreadleLM]:
    lm = TreadleLM(str(folder), batch_size=3, threads=2, kv="f32")
    yield lm
    lm.model.close()


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder), device="cpu", dtype="float32", batch_size=3)


def evaluated(lm: Any, tasks: TaskManager, name: str, **settings: Any) -> tuple[Any, list[Any]]:
    """The metrics of a task, and the model's answers by document."""
    results = lm_eval.simple_evaluate(
        model=lm, tasks=[name], task_manager=tasks, bootstrap_iters=0, verbosity="ERROR", **settings
    )
    samples = sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
    metrics = {k: v for k, v in results["results"][name].items() if isinstance(v, float)}
    return metrics, [sample["filtered_resps"] for sample in samples]


def test_choices(ours: TreadleLM, theirs: Any, tasks: TaskManager) -> None:
    """Float32 throughout: a log-probability is the sum of up to 10 of about 10, each of logits that
    are sums of 64 products.
    """
    for settings in ({}, {"apply_chat_template": True}):
        metrics, answers = evaluated(ours, tasks, "tiny_choices", **settings)
        expected, their_answers = evaluated(theirs, tasks, "tiny_choices", **settings)
        assert metrics == expected
        scores = np.array([[score for score, _ in each] for each in answers], float)
        their_scores = np.array([[score for score, _ in each] for each in their_answers], float)
        assert np.abs(scores - their_scores).max() < 2e-4
        assert np.ptp(scores) > 10  # they differ much more than that
        greedy = [[flag for _, flag in each] for each in answers]
        assert greedy == [[flag for _, flag in each] for each in their_answers]


def test_rolling(ours: TreadleLM, theirs: Any, tasks: TaskManager) -> None:
    metrics, answers = evaluated(ours, tasks, "tiny_rolling")
    expected, their_answers = evaluated(theirs, tasks, "tiny_rolling")
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert np.ravel(answers) == pytest.approx(np.ravel(their_answers), rel=1e-5)


def whole(texts: list[str]) -> list[str]:
    """Texts with one sign for bytes at the end that are no character: transformers writes one for
    each byte.
    """
    return [re.sub("\ufffd+$", "\ufffd", text) for text in texts]


def test_written(ours: TreadleLM, theirs: Any, tasks: TaskManager) -> None:
    for settings in ({}, {"apply_chat_template": True}):
        metrics, answers = evaluated(ours, tasks, "tiny_written", **settings)
        expected, their_answers = evaluated(theirs, tasks, "tiny_written", **settings)
        assert metrics == expected
        assert [*map(whole, answers)] == [*map(whole, their_answers)]
        assert any(answer != [""] for answer in answers)


def test_tokens(ours: TreadleLM, theirs: Any) -> None:
    for text in (TEXT, "<s>the cat", " mat", "naïve </s>"):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        for flag in (True, False):
            given = {"add_special_tokens": flag}
            assert ours.tok_encode(text, **given) == theirs.tok_encode(text, **given)
    assert ours.prefix_token_id == theirs.prefix_token_id == 0
    assert ours.eot_token_id == theirs.eot_token_id == 1
    assert ours.max_length == theirs.max_length == N_CTX
    chat = [{"role": "user", "content": "hill"}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    chat.append({"role": "assistant", "content": "the"})
    begun = ours.apply_chat_template(chat, add_generation_prompt=False)
    assert begun == theirs.apply_chat_template(chat, add_generation_prompt=False)
    assert ours.chat_template(True) == theirs.chat_template(True) == TEMPLATE
    assert ours.chat_template(False) is None
    with pytest.raises(treadle.TreadleError, match="name the template in model_args"):
        ours.chat_template("tools")


def requests_of(kind: Any, *arguments: Any) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def test_long_contexts(ours: TreadleLM, theirs: Any) -> None:
    """A context that is too long loses its beginning, for both kinds of requests."""
    long = " ".join([TEXT] * 4)
    pairs = requests_of("loglikelihood", (long, " the cat"), ("", " the cat sat"), (TEXT, " red"))
    made = np.array(ours.loglikelihood(pairs, disable_tqdm=True), float)
    expected = np.array(theirs.loglikelihood(pairs, disable_tqdm=True), float)
    assert np.abs(made - expected).max() < 2e-4
    asked = {"until": ["\n"], "max_gen_toks": 8}
    texts = requests_of("generate_until", (long, asked), (TEXT, asked))
    given = ours.generate_until(texts, disable_tqdm=True)
    assert whole(given) == whole(theirs.generate_until(texts, disable_tqdm=True))
    with pytest.raises(treadle.ContextFullError, match="give a larger max_length"):
        ours.loglikelihood(requests_of("loglikelihood", ("a", long)), disable_tqdm=True)
    with pytest.raises(treadle.TreadleError, match="expected less than the context of 96"):
        ours.generate_until(
            requests_of("generate_until", ("a", {"max_gen_toks": N_CTX})), disable_tqdm=True
        )


def test_settings(ours: TreadleLM, folder: Path) -> None:
    assert read_sampling({"do_sample": False, "temperature": 0.7}).temperature == 0
    sampled = read_sampling(
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1}
    )
    assert (sampled.temperature, sampled.top_p, sampled.repeat_penalty) == (0.7, 0.9, 1.1)
    assert (sampled.top_k, sampled.min_p) == (0, 0)
    with pytest.raises(treadle.TreadleError, match="generation_kwargs: num_beams: expected one of"):
        read_sampling({"num_beams": 3})
    with pytest.raises(treadle.TreadleError, match="batch_size is 'many': expected"):
        TreadleLM(str(folder), batch_size="many")
    with pytest.raises(treadle.TreadleError, match="path and pretrained are the same"):
        TreadleLM(str(folder), pretrained=str(folder))


def test_reasoning_is_dropped(ours: TreadleLM, monkeypatch: pytest.MonkeyPatch) -> None:
    request = requests_of("generate_until", (TEXT, {"until": [], "max_gen_toks": 12}))
    (whole,) = ours.generate_until(request, disable_tqdm=True)
    mark = whole[3:5]
    monkeypatch.setattr(ours, "_think_end", mark)
    (rest,) = ours.generate_until(request, disable_tqdm=True)
    assert rest == whole.split(mark)[-1].lstrip()


def test_command_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``python -m lm_eval_treadle --model treadle``: the results of lm-eval as a table."""
    arguments = f"--model treadle --model_args path={folder},threads=2 --tasks tiny_choices"
    arguments += f" --include_path {folder} --batch_size auto --limit 4"
    monkeypatch.setattr(sys, "argv", ["lm_eval", *arguments.split()])
    # Reading lm-eval's own thousands of tasks takes half a minute.
    only_these = functools.partial(TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", only_these)
    runpy.run_module("lm_eval_treadle", run_name="__main__")
    table = capsys.readouterr().out
    assert "tiny_choices" in table
    assert "acc_norm" in table
