"""mlx-lm's tensor names and layouts where they differ from transformers': experts, latent
attention, convolution taps.

mlx-lm stacks experts (``switch_mlp``), splits fused matrices, stores a convolution's taps as
[channels, taps, 1], and norms of Qwen's delta nets larger by one, as GGUF does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from treadle.convert.hf.tensor_names import Names

if TYPE_CHECKING:
    from treadle.convert.quantized.dequantized_tensor import Found
    from treadle.files.safetensors import SafeTensor

_THREE = ("gate", "up", "down")
_EXPERTS = ("mlp.switch_mlp", "block_sparse_moe.switch_mlp", "feed_forward.switch_mlp")
MLX_NAMES: Names = {  # GGUF's stems, by mlx-lm's
    **{f"{at}.{one}_proj": f"ffn_{one}_exps" for at in _EXPERTS for one in _THREE},
    **{f"experts.switch_glu.{one}_proj": f"ffn_{one}_exps" for one in _THREE},  # Gemma 4's
    **{f"feed_forward.{one}_proj": f"ffn_{one}" for one in _THREE},  # LFM2's layers without experts
    "mixer.switch_mlp.fc1": "ffn_up_exps",  # Nemotron's
    "mixer.switch_mlp.fc2": "ffn_down_exps",
    **dict.fromkeys(("mlp.gate.gate_proj", "mlp.gate.proj"), "ffn_gate_inp"),  # Ling's, Laguna's
    "self_attn.embed_q": "attn_k_b",
    "self_attn.unembed_out": "attn_v_b",
}
_TAPS = (".conv1d.weight", ".conv.conv.weight")


def as_transformers(tensors: Mapping[str, SafeTensor]) -> tuple[Found, bool]:
    """Return the tensors with convolution taps as [channels, 1, taps], and whether any had mlx-lm's
    layout, [channels, taps, 1].
    """
    result = dict(tensors)
    laid = False
    for name, tensor in tensors.items():
        if (
            name.endswith(_TAPS)
            and len(tensor.shape) == 3
            and tensor.shape[2] == 1 < tensor.shape[1]
        ):
            channels, taps, _ = tensor.shape
            result[name] = replace(tensor, shape=(channels, 1, taps))
            laid = True
    return result, laid
