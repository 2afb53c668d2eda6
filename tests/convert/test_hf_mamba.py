"""Families with layers of Mamba-2: as ``test_hf_mixtures`` has it, and each key's value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.convert.test_hf_mixtures import check, check_both, own
from tests.models.hf_cases import Case
from treadle.convert.hf.config import read_config
from treadle.errors import FileError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf

_KINDS = ["linear_attention", "moe", "full_attention", "moe"]
_DENSE = ["linear_attention", "mlp", "full_attention", "mlp"]
_GRANITE = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 32,
    "ssm_state_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
}
_EXPERTS = {
    "layers_block_type": _KINDS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
}
_FALCON = {
    "head_dim": 32,
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
}
_FACTORS = {
    "embedding_multiplier": 1.5,
    "lm_head_multiplier": 0.75,
    "attention_in_multiplier": 1.25,
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "mlp_multipliers": [0.8, 1.3],
    "ssm_in_multiplier": 1.1,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_out_multiplier": 0.6,
}
# By the name of the file that llama.cpp's converter wrote of such a one.
CASES: dict[str, Case] = {
    "granitehybrid": Case("GraniteMoeHybrid", "granitehybrid", _GRANITE),
    "mamba2": Case(
        "Mamba2",
        "mamba2",
        {"num_hidden_layers": 3, "num_heads": 4, "head_dim": 32, "state_size": 32, "n_groups": 1},
    ),
    "nemotronh": Case("NemotronH", "nemotron_h_moe", {**_NEMOTRON, **_EXPERTS}),
    "falconh1": Case("FalconH1", "falcon-h1", _FALCON),
}
# Of which there is no such file.
FURTHER = {
    "granite-dense": Case(
        "GraniteMoeHybrid", "granitehybrid", {**_GRANITE, "num_local_experts": 0}
    ),
    "granite-attention": Case(
        "GraniteMoeHybrid",
        "granite",
        {
            **_GRANITE,
            "layer_types": ["attention"] * 4,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
        },
    ),
    "granite-attention-experts": Case(
        "GraniteMoeHybrid",
        "granitemoe",
        {**_GRANITE, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
    ),
    # Without a rope; a scaling that the file has all the same scales nothing.
    **{
        f"granite-still-{name}-{n}": Case(
            "GraniteMoeHybrid",
            arch if n else arch.replace("moe", ""),
            {
                **_GRANITE,
                "layer_types": kinds,
                "num_local_experts": n,
                "position_embedding_type": None,
                "rope_parameters": _LLAMA3,
            },
        )
        for name, arch, kinds in (
            ("attention", "granitemoe", ["attention"] * 4),
            ("hybrid", "granitehybrid", _GRANITE["layer_types"]),
        )
        for n in (0, 8)
    },
    "mamba2-groups": Case(
        "Mamba2",
        "mamba2",
        {"num_heads": 4, "head_dim": 32, "state_size": 32, "n_groups": 2, "use_bias": True},
    ),
    "nemotronh-dense": Case("NemotronH", "nemotron_h", {**_NEMOTRON, "layers_block_type": _DENSE}),
    "nemotronh-latent": Case(
        "NemotronH", "nemotron_h_moe", {**_NEMOTRON, **_EXPERTS, "moe_latent_size": 32}
    ),
    # Also of the shared expert, and of the matrices in and out of the smaller space.
    **{
        f"nemotronh-biases-{i}": Case(
            "NemotronH",
            "nemotron_h_moe",
            {**_NEMOTRON, **_EXPERTS, "mlp_bias": True, "use_bias": True, **more},
        )
        for i, more in enumerate(({}, {"moe_latent_size": 32}))
    },
    "falconh1-factors": Case(
        "FalconH1",
        "falcon-h1",
        {
            **_FALCON,
            **_FACTORS,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_n_groups": 2,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_in_place_and_converted(name: str, tmp_path: Path, data: Path) -> None:
    check(name, own(CASES[name]), tmp_path, data)
    with (
        open_gguf(tmp_path / "made.gguf") as ours,
        open_gguf(data / "arch" / f"{name}.gguf") as its,
    ):
        assert keys(its).items() - keys(ours).items() == set()


def keys(file: GGUF) -> dict[str, Any]:
    """Those of the architecture, but for how long a text may be and which norms have an epsilon."""
    prefix = f"{file.metadata['general.architecture']}."
    found: dict[str, Any] = {
        key.removeprefix(prefix): value if isinstance(value, str | int | float) else tuple(value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    found.pop("context_length")
    return {key: value for key, value in found.items() if "epsilon" not in key}


@pytest.mark.parametrize("name", FURTHER)
def test_others(name: str, tmp_path: Path) -> None:
    with open_gguf(check_both(own(FURTHER[name]), tmp_path)) as made:
        assert made.metadata["general.architecture"] == FURTHER[name].arch


# -- config.json --------------------------------------------------------------------------------

_SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 320}


def read(kind: str, **given: Any) -> dict[str, Any]:
    hyper = read_config({"model_type": kind, **_SIZES, **given}, Path("config.json"))
    arch = hyper.metadata.pop("general.architecture")
    return {key.removeprefix(f"{arch}."): value for key, value in hyper.metadata.items()}


def test_older_spellings_of_nemotron() -> None:
    """Layers by letters, and a key of its own for the width of heads."""
    new = read("nemotron_h", layers_block_type=_DENSE, head_dim=32)
    old = read("nemotron_h", hybrid_override_pattern="M-*-", attention_head_dim=32)
    assert new == old
    assert new["attention.head_count_kv"] == [0, 0, 8, 0]
    assert new["feed_forward_length"] == [0, 21504, 0, 21504]
    kinds = ["mamba", "mlp", "attention", "mlp"]
    assert read("nemotron_h", layers_block_type=kinds, head_dim=32) == new


GRANITE: dict[str, Any] = {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0}
FALCON = {"mamba_rms_norm": True, "mamba_norm_before_gate": True}


@pytest.mark.parametrize("limit", [float("inf"), {"__float__": "Infinity"}, 0.5], ids=str)
@pytest.mark.parametrize("kind", ["granitemoehybrid", "mamba2", "falcon_h1", "nemotron_h"])
def test_bounds_of_time_steps(kind: str, limit: object) -> None:
    given = {
        "granitemoehybrid": GRANITE,
        "nemotron_h": {"layers_block_type": _DENSE},
    }.get(kind, {})
    if limit == 0.5:
        with pytest.raises(UnsupportedError, match=r"time_step_limit: is .*bounds on time steps"):
            read(kind, **given, time_step_limit=[0.0, limit])
    else:
        assert read(kind, **given, time_step_limit=[0.0, limit])["ssm.inner_size"] > 0


@pytest.mark.parametrize(
    ("kind", "given", "why"),
    [
        ("granitemoehybrid", {**GRANITE, "layer_types": None}, "layer_types: is missing"),
        (
            "granitemoehybrid",
            {**GRANITE, "layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
            "layer_types: is .*a list of 4",
        ),
        ("falcon_h1", FALCON, "mamba_norm_before_gate: is true"),
        (
            "falcon_h1",
            {"tie_word_embeddings": True, "embedding_multiplier": 2.0},
            "tie_word_embeddings: is true",
        ),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers: .*a list of 2"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 1.0, "x", 1.0, 1.0]}, "ssm_multipliers: is 'x'"),
        ("nemotron_h", {"layers_block_type": ["mlp", "moe"] * 2}, "has both mlp and moe"),
        (
            "nemotron_h",
            {"layers_block_type": ["mlp", "conv"] * 2},
            "treadle supports linear_attention",
        ),
        ("nemotron_h", {"layers_block_type": _DENSE[:3]}, "num_hidden_layers: is 4"),
        ("nemotron_h", {}, "hybrid_override_pattern: is missing"),
    ],
    ids=str,
)
def test_what_is_refused(kind: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises((UnsupportedError, FileError), match=why):
        read(kind, **given)


@pytest.mark.parametrize("key", ["time_step_min", "mamba_dt_min"])
def test_a_bound_of_time_steps_from_below(key: str) -> None:
    """transformers takes it for one: more than its default is refused."""
    plain = read("nemotron_h", layers_block_type=_DENSE)
    for value in (0.001, 0.0, None):
        assert read("nemotron_h", layers_block_type=_DENSE, **{key: value}) == plain
    with pytest.raises(UnsupportedError, match=f"{key}: is 0.7: a lower bound on time steps"):
        read("nemotron_h", layers_block_type=_DENSE, **{key: 0.7})
