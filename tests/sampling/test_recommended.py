"""What a model's files recommend: both forms, and what is no number or out of range."""

from __future__ import annotations

from treadle.sampling.settings import Sampling, read_generation_config, recommended


def test_a_gguf_file() -> None:
    found = recommended(
        {
            "general.sampling.temp": 0.25,
            "general.sampling.top_k": 7,
            "general.sampling.top_p": 9.0,
            "general.sampling.min_p": "no number",
            "general.sampling.penalty_repeat": 1.25,
        }
    )
    assert found == Sampling(temperature=0.25, top_k=7, repeat_penalty=1.25)


def test_a_generation_config() -> None:
    found = read_generation_config(
        {
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
            "min_p": None,
            "repetition_penalty": 1.05,
            "eos_token_id": [1, 2],
            "xtc_probability": float("nan"),
            "mirostat": True,
        }
    )
    assert found == {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.penalty_repeat": 1.05,
    }
    assert recommended(found) == Sampling(
        temperature=0.6, top_k=20, top_p=0.95, repeat_penalty=1.05
    )
    assert read_generation_config({"do_sample": False, "temperature": 1.0}) == {}
    assert recommended({}) == Sampling()
