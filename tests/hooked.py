"""What hooks give of a text, to compare devices."""

from __future__ import annotations

import numpy as np

import treadle


def hooked_rows(model: treadle.Model, ids: list[int]) -> dict[str, np.ndarray]:
    """Of a model with at least two layers: traced steps, states, attention, a lens, a patch."""

    def without_head(values: np.ndarray) -> None:
        values[:, 1] = 0

    with model.trace("L1.ffn.silu", "L0.attn") as t:
        model.logits(ids)
    with model.patch({"L0.attn": without_head}):
        patched = model.logits(ids)
    return {
        "packed": t["L1.ffn.silu"].values,
        "heads": t["L0.attn"].values,
        "states": model.states(ids, layers="all"),
        "attention": model.attention(ids, 1).weights,
        "lens": model.lens(ids, positions=[-1]).logits,
        "patched": patched,
    }


def check_alike(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Check that two devices agree to 1e-4, as their logits in float32 do."""
    for name, rows in expected.items():
        error = np.sqrt(np.mean((found[name] - rows) ** 2) / np.mean(rows**2))
        assert error < 1e-4, (name, error)
