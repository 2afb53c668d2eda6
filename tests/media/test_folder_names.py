"""Names of tensors in Hugging Face folders that shared/data/media lacks, as transformers 5.24 has
them: rows of such folders were equal to the truth on 28 November 2026.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.media.media_cases import BY_NAME, file_of
from treadle.media.families import hf_names_of

NAMES = {
    "qwen2vl": """
        visual.patch_embed.proj.weight visual.blocks.1.norm1.weight visual.blocks.1.norm1.bias
        visual.blocks.1.norm2.weight visual.blocks.1.norm2.bias visual.blocks.1.attn.proj.weight
        visual.blocks.1.attn.proj.bias visual.blocks.1.mlp.fc1.weight visual.blocks.1.mlp.fc1.bias
        visual.blocks.1.mlp.fc2.weight visual.blocks.1.mlp.fc2.bias visual.merger.ln_q.weight
        visual.merger.ln_q.bias visual.merger.mlp.0.weight visual.merger.mlp.0.bias
        visual.merger.mlp.2.weight visual.merger.mlp.2.bias
    """,
    "glm4v": """
        visual.patch_embed.proj.weight visual.patch_embed.proj.bias visual.blocks.1.norm1.weight
        visual.blocks.1.norm2.weight visual.blocks.1.attn.qkv.weight
        visual.blocks.1.attn.proj.weight visual.blocks.1.mlp.gate_proj.weight
        visual.blocks.1.mlp.up_proj.weight visual.blocks.1.mlp.down_proj.weight
        visual.embeddings.position_embedding.weight visual.post_conv_layernorm.weight
        visual.post_layernorm.weight visual.downsample.weight visual.downsample.bias
        visual.merger.proj.weight visual.merger.post_projection_norm.weight
        visual.merger.post_projection_norm.bias visual.merger.gate_proj.weight
        visual.merger.up_proj.weight visual.merger.down_proj.weight
    """,
}


@pytest.mark.parametrize(("name", "model_type"), [("qwen2vl", "qwen2_vl"), ("glm4v", "glm4v")])
def test_names(name: str, model_type: str, data: Path) -> None:
    """Each name is one of mmproj.gguf, and with layer 1 they are all of it."""
    table = hf_names_of(model_type, "config.json")
    names = NAMES[name].split()
    assert all(each.startswith(table.prefixes) for each in names)
    found = {table.name_of(each, {}) for each in names}
    layer = ("v.blk.0.", "v.blk.2.")
    theirs = {each for each in file_of(BY_NAME[name], data).tensors if not each.startswith(layer)}
    theirs -= {"v.patch_embd.weight.1"}  # of the second frame, made from the first's
    split = {f"v.blk.1.attn_{kind}.{end}" for kind in "qkv" for end in ("weight", "bias")}
    assert found == theirs - split
    assert table.name_of("visual.blocks.1.attn.qkv.weight", {}) == "v.blk.1.attn_qkv.weight"
    assert table.name_of("visual.blocks.1.attn.gate.weight", {}) == ""
    assert table.name_of("visual.rotary_pos_emb.inv_freq", {}) == ""
