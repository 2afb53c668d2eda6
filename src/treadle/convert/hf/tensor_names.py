"""Tensor names of transformers and GGUF: a table for each naming scheme.

A table maps transformers' name to GGUF's stem. Names are those after "layers.N.", or those of
tensors outside layers; prefixes such as "model." are stripped, and ".weight" and ".bias" are left
out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Names = Mapping[str, str]

LLAMA: Names = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
LLAMA_EXPERTS: Names = {
    **LLAMA,
    "mlp.gate": "ffn_gate_inp",
    "mlp.score": "exp_probs_b",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    **{f"mlp.experts.{one}_proj": f"ffn_{one}_exps" for one in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
}
POST_NORMS: Names = {  # with four norms per layer, the same names mean other norms
    **LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
SEED_OSS: Names = {**LLAMA, "post_attention_layernorm": "post_attention_norm"}
PHI3: Names = {**LLAMA, "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
GLM4: Names = {
    **LLAMA,
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
HUNYUAN: Names = {
    **LLAMA,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
HUNYUAN_EXPERTS: Names = {
    **LLAMA_EXPERTS,
    **HUNYUAN,
    "mlp.gate.wg": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{one}_proj": f"ffn_{one}_shexp" for one in ("gate", "up", "down")},
}
STARCODER2: Names = {**LLAMA, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
NEOX: Names = {
    "embed_in": "token_embd",
    "final_layer_norm": "output_norm",
    "embed_out": "output",
    "lm_head": "output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GPT2: Names = {
    "wte": "token_embd",
    "wpe": "position_embd",
    "ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
BERT: Names = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
JINA_BERT: Names = {
    **BERT,
    "mlp.gated_layers": "ffn_up",  # fused with its gate, which comes first
    "mlp.wo": "ffn_down",
    "mlp.layernorm": "layer_output_norm",
    # Of jina-v2-code.
    "attention.self.layer_norm_q": "attn_q_norm",
    "attention.self.layer_norm_k": "attn_k_norm",
    "layer_norm_1": "attn_norm_2",
    "layer_norm_2": "layer_output_norm",
    "mlp.up_layer": "ffn_up",
    "mlp.gate_layer": "ffn_gate",
    "mlp.down_layer": "ffn_down",
}
# transformers' recent encoders; it saves some in the names of their first code.
LATE_BERT: Names = {
    "embeddings.LayerNorm": "token_embd_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
NOMIC_BERT: Names = {
    **LATE_BERT,
    "embeddings.word_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "emb_ln": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "mlp.fc11": "ffn_up",
    "mlp.fc12": "ffn_gate",
    "mlp.fc2": "ffn_down",
    "norm2": "layer_output_norm",
}
NOMIC_BERT_EXPERTS: Names = {
    **NOMIC_BERT,
    "mlp.fc1": "ffn_up",
    "mlp.router.layer": "ffn_gate_inp",
    "mlp.experts.w1": "ffn_up_exps",
    "mlp.experts.w2": "ffn_down_exps",
    "mlp.experts_bias": "ffn_exps_bias",
}
MODERN_BERT: Names = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
# Heads that score a pair of texts: ``cls`` with its activation, a norm, then ``cls.output``.
BERT_SCORE: Names = {"pooler.dense": "cls", "classifier": "cls.output"}
ROBERTA_SCORE: Names = {"classifier.dense": "cls", "classifier.out_proj": "cls.output"}
MODERN_BERT_SCORE: Names = {
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
}
SCORE: Names = {"score": "cls.output"}
HEADS = (
    "lm_head",
    "embed_out",
    "pre_classifier",
    "classifier",
    "head",
    "score",
)  # outside the prefix, and absent if tied

# A text model, the text part of a larger one (old layout, new layout), or a bare decoder.
_PREFIX = re.compile(
    r"(?:language_model\.model\.|model\.language_model\.|model\.llm\.|language_model\.|model\.text_model\.|model\."
    r"|thinker\.(?:model\.)?"
    r"|transformer\.|gpt_neox\.|bert\.|roberta\.|mpnet\.|nomic_bert\.|backbone\."
    r"|distilbert\.transformer\.|distilbert\.|electra\.|new\.|gte\.)?"
)
_LAYER = (
    r"(?P<layers>(?:(?P<side>encoder|decoder)\.)?(?:layers?|block)|h|blocks|transformer_encoder)"
    r"\.(?P<layer>0|[1-9]\d{0,5})\."
)
_KIND = r"(?P<kind>weight|bias|scale|(?<=LayerNorm\.)(?:gamma|beta))"
# Jina's matrices with task adapters: "parametrizations.weight.original".
_KEPT = r"(?:(?<=\.parametrizations\.weight)\.original)?"
NAME = re.compile(
    rf"{_PREFIX.pattern}(?:{_LAYER})?(?P<stem>[A-Za-z0-9_.]+?)(?:\.parametrizations)?\.{_KIND}{_KEPT}"
)
OLDER_KINDS = {"gamma": "weight", "beta": "bias"}  # of BERT's first checkpoints
# Buffers that follow from the configuration, GPT's masks, and ALiBi slopes.
NOT_WEIGHTS = re.compile(
    r".*(?:\.rotary_(?:pos_)?emb\.inv_freq|\.(?:attn|attention)\.(?:(?:masked_)?bias|causal_mask)"
    r"|(?:^|\.)relative_pe\.slopes)"
)
# MTP layers: after the last layer, or in a separate part.
MTP_TENSOR = re.compile(
    r"(?:mtp\.|model\.mtp(?:_\w+)?\.|model\.(?:language_model\.)?layers\.(?P<layer>\d+)\.)"
)
# Unused in encoders: masked-word heads, poolers, and index buffers.
NOT_STATES = re.compile(
    r"(?:\w+\.)?(?:cls|lm_head|decoder|head|classifier|score|pooler)\..*|.*\.(?:position|token_type)_ids"
    r"|(?:pre_classifier|vocab_\w+|\w+_predictions|generator_lm_head)\..*"
    r"|.*\.\d+\.lora_[AB]"
)
ADAPTED = re.compile(r".*\.parametrizations\.weight\.\d+\.lora_A")
NOT_TEXT = re.compile(
    r"(?:model\.|thinker\.)?(?:vision_tower|multi_modal_projector|vision_model|visual|connector|vit|vit_large_projector|mlp1"
    r"|audio|audio_tower|audio_encoder|embed_vision|embed_audio|vision_embedder|vision_encoder|vision_projection|vision_adapter|video_tower"
    r"|image_tower|encoder|projector|mm_projector|aligner|vqmodel|generation_\w+|merger|high_res_vision_\w+"
    r"|visual_embeddings_table|layerwise_projectors|spatial_projectors)\..*"
    r"|(?:model\.)?(?:image_newline|high_res_vision_alpha)"
)


def experts_123(at: str) -> Names:
    """Return a name table for experts whose matrices are ``w1`` (gate), ``w2`` (down) and ``w3``
    (up). ``at``: the prefix of their names.
    """
    return {
        f"{at}gate": "ffn_gate_inp",
        **dict.fromkeys(("mlp.gate", "mlp.router"), "ffn_gate_inp"),  # transformers 5's adapters
        f"{at}score": "exp_probs_b",
        f"{at}experts.w1": "ffn_gate_exps",
        f"{at}experts.w2": "ffn_down_exps",
        f"{at}experts.w3": "ffn_up_exps",
    }


def checkpoint_name(name: str, sibling: str, layer: int) -> str:
    """Return the full checkpoint name of ``name``, a name as in the tables with its suffix, in
    ``layer`` (-1: outside layers), with the prefixes that the tensor ``sibling`` has.
    """
    match = NAME.fullmatch(sibling)
    before = _PREFIX.match(sibling)
    prefix = before[0] if before else ""
    if name.startswith(HEADS):
        return name
    if layer < 0:
        return prefix + name
    return f"{prefix}{(match and match['layers']) or 'layers'}.{layer}.{name}"
