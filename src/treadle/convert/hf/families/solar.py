"""Family row of Solar Open."""

from __future__ import annotations

from dataclasses import replace

from treadle.convert.hf.families.glm import GLM_FAMILIES
from treadle.convert.hf.family import Family

_GLM4 = GLM_FAMILIES["glm4_moe"]

SOLAR_FAMILIES: dict[str, Family] = {
    "solar_open": replace(
        _GLM4,
        defaults={
            **_GLM4.defaults,
            "rope_theta": 1e6,
            "vocab_size": 196608,
            "head_dim": 128,
            "partial_rotary_factor": 1.0,
            "intermediate_size": 10240,  # unused
            "moe_intermediate_size": 1280,
            "first_k_dense_replace": 0,
        },
        only={"first_k_dense_replace": 0, "use_qk_norm": False},
        extra_layers="",
    ),
}
