"""Which model of a repository is taken, from the names and sizes that real ones have."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import FileError
from treadle.hub import HubName, parse
from treadle.hub.offers import QUALITY, best, find_offers, one_model, tag_of, tagged

GB = 10**9

BARTOWSKI = {
    ".gitattributes": 4000,
    "README.md": 9000,
    "Llama-3.2-1B-Instruct-IQ3_M.gguf": 0.66 * GB,
    "Llama-3.2-1B-Instruct-Q4_0.gguf": 0.77 * GB,
    "Llama-3.2-1B-Instruct-Q4_0_4_4.gguf": 0.77 * GB,
    "Llama-3.2-1B-Instruct-Q4_K_M.gguf": 0.81 * GB,
    "Llama-3.2-1B-Instruct-Q6_K_L.gguf": 1.09 * GB,
    "Llama-3.2-1B-Instruct-Q8_0.gguf": 1.32 * GB,
    "Llama-3.2-1B-Instruct-f16.gguf": 2.48 * GB,
    "Llama-3.2-1B-Instruct.imatrix": 1,
}
UNSLOTH = {
    "BF16/Qwen3-32B-BF16-00001-of-00002.gguf": 49 * GB,
    "BF16/Qwen3-32B-BF16-00002-of-00002.gguf": 16 * GB,
    "Qwen3-32B-Q4_K_M.gguf": 20 * GB,
    "Qwen3-32B-UD-Q4_K_XL.gguf": 20.1 * GB,
    "Qwen3-32B-UD-IQ1_S.gguf": 8 * GB,
    "Qwen3-32B-UD-Q8_K_XL.gguf": 39 * GB,
    "Qwen3-32B-Q8_0.gguf": 35 * GB,
    "imatrix_unsloth.gguf": 0.01 * GB,
    "config.json": 900,
}
GGML_ORG = {
    "gemma-3-4b-it-Q4_K_M.gguf": 2.5 * GB,
    "gemma-3-4b-it-Q8_0.gguf": 4.1 * GB,
    "gemma-3-4b-it-f16.gguf": 7.8 * GB,
    "mmproj-model-f16.gguf": 0.85 * GB,
}
QUANT_FOLDERS = {
    "Q4_K_M/Big-Q4_K_M-00001-of-00003.gguf": 40 * GB,
    "Q4_K_M/Big-Q4_K_M-00002-of-00003.gguf": 40 * GB,
    "Q4_K_M/Big-Q4_K_M-00003-of-00003.gguf": 30 * GB,
    "Q2_K/Big-Q2_K-00001-of-00002.gguf": 40 * GB,
    "Q6_K/Big-Q6_K-00001-of-00002.gguf": 80 * GB,
    "Q6_K/Big-Q6_K-00002-of-00002.gguf": 80 * GB,
    "MTP/Big-MTP-Q8_0.gguf": 3 * GB,
}
MRADERMACHER = {"Phi.i1-IQ1_M.gguf": 1 * GB, "Phi.i1-Q4_K_S.gguf": 2 * GB, "imatrix.dat": 5}


def take(
    files: Mapping[str, float], gb: float | None, repo: str = "o/r", tag: str = ""
) -> str | None:
    offers = one_model(tagged(find_offers({p: int(n) for p, n in files.items()}), tag), repo)
    found = best(offers, None if gb is None else int(gb * GB))
    return found.paths[0] if found else None


@pytest.mark.parametrize(
    ("files", "gb", "expected"),
    [
        (BARTOWSKI, 64, "Llama-3.2-1B-Instruct-Q8_0.gguf"),  # F16 gains nothing
        (BARTOWSKI, 2.4, "Llama-3.2-1B-Instruct-Q6_K_L.gguf"),
        (BARTOWSKI, 2.0, "Llama-3.2-1B-Instruct-Q4_K_M.gguf"),
        (BARTOWSKI, 1.95, "Llama-3.2-1B-Instruct-Q4_0.gguf"),  # never one packed for Arm
        (BARTOWSKI, 1.83, "Llama-3.2-1B-Instruct-IQ3_M.gguf"),
        (BARTOWSKI, 1.0, None),
        (BARTOWSKI, None, "Llama-3.2-1B-Instruct-Q8_0.gguf"),
        (UNSLOTH, 128, "Qwen3-32B-Q8_0.gguf"),
        (UNSLOTH, 32, "Qwen3-32B-UD-Q4_K_XL.gguf"),
        (UNSLOTH, 16, None),  # IQ1_S would fit, and is not worth it
        (GGML_ORG, 6, "gemma-3-4b-it-Q8_0.gguf"),
        (GGML_ORG, 4, "gemma-3-4b-it-Q4_K_M.gguf"),  # the projector is no model
        (QUANT_FOLDERS, 256, "Q6_K/Big-Q6_K-00001-of-00002.gguf"),
        (QUANT_FOLDERS, 130, "Q4_K_M/Big-Q4_K_M-00001-of-00003.gguf"),
        (QUANT_FOLDERS, 50, None),  # Q2_K lacks a shard
        (MRADERMACHER, 8, "Phi.i1-Q4_K_S.gguf"),
        ({"model.gguf": 2 * GB}, 8, "model.gguf"),
        ({"tiny-F16.gguf": 2 * GB, "tiny-F32.gguf": 4 * GB}, 64, "tiny-F16.gguf"),
        ({"bit-TQ1_0.gguf": 1 * GB}, 8, "bit-TQ1_0.gguf"),  # the only one, whatever it is
        ({"model-7b-Q4_0.gguf": 4 * GB, "model-13b-Q4_0.gguf": 7 * GB}, 64, None),
    ],
)
def test_the_best_that_fits(
    files: Mapping[str, float], gb: float | None, expected: str | None
) -> None:
    assert take(files, gb) == expected


def test_of_several_models_the_one_that_the_repository_is_called_for() -> None:
    files = {"Nice-7B-Q4_K_M.gguf": 4 * GB, "Nice-7B-imat-Q4_K_M.gguf": 4 * GB}
    assert take(files, 64, "o/Nice-7B-GGUF") == "Nice-7B-Q4_K_M.gguf"
    assert take(files, 64, "o/other") is None


@pytest.mark.parametrize("tag", ["Q4_K_M", "q4_k_m", "Q4_K", "UD-Q4_K_M"])
def test_a_type_is_named_as_ollama_and_llama_cpp_do(tag: str) -> None:
    assert take(BARTOWSKI, 64, tag=tag) == "Llama-3.2-1B-Instruct-Q4_K_M.gguf"
    assert take(BARTOWSKI, 64, tag="latest") == "Llama-3.2-1B-Instruct-Q8_0.gguf"
    assert take(BARTOWSKI, 64, tag="Q5_K_M") is None


def test_shards_count_together() -> None:
    (offer,) = tagged(find_offers({p: int(n) for p, n in QUANT_FOLDERS.items()}), "Q4_K_M")
    assert (len(offer.paths), offer.n_bytes) == (3, 110 * GB)


@pytest.mark.parametrize(
    ("path", "tag", "stem"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0", "qwen3-0-6b"),
        ("model_q5_k_m_v2.gguf", "Q5_K_M", "model-v2"),
        ("Big-fp16.gguf", "F16", "big"),
        ("UD-Q2_K_XL/X-UD-Q2_K_XL-00001-of-00002.gguf", "Q2_K_XL", "x"),
        ("7b/x-IQ4_XS.gguf", "IQ4_XS", "7b-x"),
        ("plain.gguf", "", "plain"),
    ],
)
def test_a_name_in_parts(path: str, tag: str, stem: str) -> None:
    assert tag_of(path) == (tag, stem)


@given(st.sets(st.sampled_from(QUALITY), min_size=2), st.integers(0, 60))
def test_more_memory_never_takes_a_worse_one(tags: set[str], gb: int) -> None:
    offers = find_offers({f"m-{tag}.gguf": (40 - QUALITY.index(tag)) * GB for tag in tags})
    less = best(offers, gb * GB)
    more = best(offers, (gb + 5) * GB)
    if less is not None:
        assert more is not None
        assert QUALITY.index(more.tag) <= QUALITY.index(less.tag)
        assert less.needs <= gb * GB


def test_names() -> None:
    assert parse("hf:owner/repo/a/b.gguf") == HubName("owner/repo", "a/b.gguf")
    assert parse("hf:owner/repo@v1/b.gguf") == HubName("owner/repo", "b.gguf", "v1")
    assert parse("hf:owner/repo/") == HubName("owner/repo")
    assert parse("hf:owner/repo:Q4_K_M") == HubName("owner/repo", tag="Q4_K_M")
    assert parse("hf:owner/repo@v1:q8_0") == HubName("owner/repo", "", "v1", "q8_0")
    pasted = "hf:https://huggingface.co/owner/repo/blob/main/b.gguf"
    assert parse(pasted) == HubName("owner/repo", "b.gguf")
    for ref in ("hf:o/r", "hf:o/r@v:Q8_0", "hf:o/r@v/b.gguf"):
        assert str(parse(ref)) == ref
    wrong = ("hf:", "hf:/", "hf:owner", "hf:/repo/x.gguf", "owner/repo/x.gguf", "hf:o/r:Q8_0/x")
    for ref in (*wrong, "hf:o/r r", "hf:o:Q4/r"):
        with pytest.raises(FileError, match="OWNER/REPO"):
            parse(ref)


@given(index=st.integers(0, 99999), count=st.integers(0, 99999))
def test_shards(index: int, count: int) -> None:
    file = HubName("o/r", f"m-{index:05d}-of-{count:05d}.gguf")
    if 1 <= index <= count <= 1000:
        shards = file.shards()
        assert len(shards) == count
        assert shards[index - 1] == file.path
    else:
        with pytest.raises(FileError):
            file.shards()
