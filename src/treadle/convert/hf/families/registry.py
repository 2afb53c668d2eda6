"""The families: a row for each ``model_type`` of transformers.

A row gives GGUF's architecture, the spelling of keys and tensors, transformers' defaults for keys
that config.json omits, and rules for tensors that GGUF stores differently. Each vendor has a file.
"""

from __future__ import annotations

from treadle.convert.hf.families.apertus import APERTUS_FAMILIES
from treadle.convert.hf.families.arcee import ARCEE_FAMILIES
from treadle.convert.hf.families.axk import AXK_FAMILIES
from treadle.convert.hf.families.baichuan import BAICHUAN_FAMILIES
from treadle.convert.hf.families.bailing import BAILING_FAMILIES, BAILING_VARIANTS
from treadle.convert.hf.families.bailing_hybrid import BAILING_HYBRID_FAMILIES
from treadle.convert.hf.families.bert import BERT_FAMILIES
from treadle.convert.hf.families.bitnet import BITNET_FAMILIES
from treadle.convert.hf.families.cohere import COHERE_FAMILIES
from treadle.convert.hf.families.dbrx import DBRX_FAMILIES
from treadle.convert.hf.families.deepseek import DEEPSEEK_FAMILIES
from treadle.convert.hf.families.deepseek4 import DEEPSEEK4_FAMILIES
from treadle.convert.hf.families.dots import DOTS_FAMILIES
from treadle.convert.hf.families.dots3 import DOTS3_FAMILIES
from treadle.convert.hf.families.drafters import DRAFTER_FAMILIES
from treadle.convert.hf.families.ernie import ERNIE_FAMILIES
from treadle.convert.hf.families.exaone import EXAONE_FAMILIES
from treadle.convert.hf.families.falcon import FALCON_FAMILIES, FALCON_VARIANTS
from treadle.convert.hf.families.gemma import GEMMA_FAMILIES, GEMMA_VARIANTS
from treadle.convert.hf.families.gemma3n import GEMMA3N_FAMILIES
from treadle.convert.hf.families.gemma4 import (
    EMBEDDING_GEMMA2_FAMILIES,
    GEMMA4_FAMILIES,
    GEMMA4_VARIANTS,
)
from treadle.convert.hf.families.gigachat import GIGACHAT_FAMILIES
from treadle.convert.hf.families.glm import GLM_FAMILIES
from treadle.convert.hf.families.glm_next import GLM_NEXT_FAMILIES
from treadle.convert.hf.families.gpt2 import GPT2_FAMILIES
from treadle.convert.hf.families.gpt_oss import GPT_OSS_FAMILIES
from treadle.convert.hf.families.granite import GRANITE_FAMILIES, GRANITE_VARIANTS
from treadle.convert.hf.families.granite_switch import GRANITE_SWITCH_FAMILIES
from treadle.convert.hf.families.grove import GROVE_FAMILIES
from treadle.convert.hf.families.helium import HELIUM_FAMILIES
from treadle.convert.hf.families.hrm import HRM_FAMILIES
from treadle.convert.hf.families.hunyuan import HUNYUAN_FAMILIES
from treadle.convert.hf.families.hunyuan4 import HUNYUAN4_FAMILIES
from treadle.convert.hf.families.hyperclovax import HYPERCLOVAX_FAMILIES
from treadle.convert.hf.families.inkling import INKLING_FAMILIES
from treadle.convert.hf.families.internlm import INTERNLM_FAMILIES
from treadle.convert.hf.families.iquestcoder import IQUESTCODER_FAMILIES
from treadle.convert.hf.families.kimi import KIMI_FAMILIES
from treadle.convert.hf.families.laguna import LAGUNA_FAMILIES
from treadle.convert.hf.families.lfm2 import LFM2_FAMILIES
from treadle.convert.hf.families.llama import LLAMA_FAMILIES
from treadle.convert.hf.families.maincoder import MAINCODER_FAMILIES
from treadle.convert.hf.families.mamba import MAMBA_FAMILIES
from treadle.convert.hf.families.maple import MAPLE_FAMILIES
from treadle.convert.hf.families.mellum import MELLUM_FAMILIES
from treadle.convert.hf.families.mimo import MIMO_FAMILIES
from treadle.convert.hf.families.minicpm import MINICPM_FAMILIES
from treadle.convert.hf.families.minimax import MINIMAX_FAMILIES
from treadle.convert.hf.families.mistral import MISTRAL_FAMILIES
from treadle.convert.hf.families.muse import MUSE_FAMILIES
from treadle.convert.hf.families.nanbeige import NANBEIGE_FAMILIES
from treadle.convert.hf.families.nanochat import NANOCHAT_FAMILIES
from treadle.convert.hf.families.nemotron import NEMOTRON_FAMILIES, NEMOTRON_VARIANTS
from treadle.convert.hf.families.olmo import OLMO_FAMILIES
from treadle.convert.hf.families.openelm import OPENELM_FAMILIES
from treadle.convert.hf.families.orion import ORION_FAMILIES
from treadle.convert.hf.families.pangu import PANGU_FAMILIES
from treadle.convert.hf.families.phi import PHI_FAMILIES
from treadle.convert.hf.families.qwen import QWEN_FAMILIES
from treadle.convert.hf.families.qwen4 import QWEN4_FAMILIES
from treadle.convert.hf.families.rwkv7 import RWKV7_FAMILIES
from treadle.convert.hf.families.sarvam import SARVAM_FAMILIES
from treadle.convert.hf.families.seed import SEED_FAMILIES
from treadle.convert.hf.families.smallthinker import SMALLTHINKER_FAMILIES
from treadle.convert.hf.families.smollm import SMOLLM_FAMILIES
from treadle.convert.hf.families.solar import SOLAR_FAMILIES
from treadle.convert.hf.families.spark import SPARK_FAMILIES
from treadle.convert.hf.families.stablelm import STABLELM_FAMILIES
from treadle.convert.hf.families.step import STEP_FAMILIES
from treadle.convert.hf.families.t5 import T5_FAMILIES
from treadle.convert.hf.families.talkie import TALKIE_FAMILIES
from treadle.convert.hf.family import Family

# Of families with one architecture, the first gives the row order of its adapters: other vendors'
# Llamas come after Llama.
FAMILIES: dict[str, Family] = {
    **LLAMA_FAMILIES,
    **APERTUS_FAMILIES,
    **ARCEE_FAMILIES,
    **AXK_FAMILIES,
    **BAICHUAN_FAMILIES,
    **BAILING_FAMILIES,
    **BAILING_HYBRID_FAMILIES,
    **BERT_FAMILIES,
    **BITNET_FAMILIES,
    **COHERE_FAMILIES,
    **DBRX_FAMILIES,
    **DEEPSEEK_FAMILIES,
    **DEEPSEEK4_FAMILIES,
    **DOTS_FAMILIES,
    **DRAFTER_FAMILIES,
    **DOTS3_FAMILIES,
    **ERNIE_FAMILIES,
    **EXAONE_FAMILIES,
    **FALCON_FAMILIES,
    **GEMMA_FAMILIES,
    **GEMMA3N_FAMILIES,
    **GEMMA4_FAMILIES,
    **EMBEDDING_GEMMA2_FAMILIES,
    **GIGACHAT_FAMILIES,
    **GLM_FAMILIES,
    **GLM_NEXT_FAMILIES,
    **GPT2_FAMILIES,
    **GPT_OSS_FAMILIES,
    **GRANITE_FAMILIES,
    **GRANITE_SWITCH_FAMILIES,
    **GROVE_FAMILIES,
    **HELIUM_FAMILIES,
    **HUNYUAN_FAMILIES,
    **HRM_FAMILIES,
    **HUNYUAN4_FAMILIES,
    **HYPERCLOVAX_FAMILIES,
    **INKLING_FAMILIES,
    **INTERNLM_FAMILIES,
    **IQUESTCODER_FAMILIES,
    **KIMI_FAMILIES,
    **LAGUNA_FAMILIES,
    **LFM2_FAMILIES,
    **MAINCODER_FAMILIES,
    **MAMBA_FAMILIES,
    **MAPLE_FAMILIES,
    **MELLUM_FAMILIES,
    **MIMO_FAMILIES,
    **MINICPM_FAMILIES,
    **MINIMAX_FAMILIES,
    **MISTRAL_FAMILIES,
    **MUSE_FAMILIES,
    **NANBEIGE_FAMILIES,
    **NANOCHAT_FAMILIES,
    **NEMOTRON_FAMILIES,
    **OLMO_FAMILIES,
    **OPENELM_FAMILIES,
    **ORION_FAMILIES,
    **PANGU_FAMILIES,
    **PHI_FAMILIES,
    **QWEN_FAMILIES,
    **QWEN4_FAMILIES,
    **RWKV7_FAMILIES,
    **SARVAM_FAMILIES,
    **SEED_FAMILIES,
    **SMALLTHINKER_FAMILIES,
    **SMOLLM_FAMILIES,
    **SOLAR_FAMILIES,
    **SPARK_FAMILIES,
    **STABLELM_FAMILIES,
    **STEP_FAMILIES,
    **T5_FAMILIES,
    **TALKIE_FAMILIES,
}
# Rows that ``variant`` chooses.
VARIANTS = (
    *NEMOTRON_VARIANTS,
    *GRANITE_VARIANTS,
    *GEMMA_VARIANTS,
    *GEMMA4_VARIANTS,
    *FALCON_VARIANTS,
    *BAILING_VARIANTS,
)
