"""A covering set of specs: every kernel, weight format, activation kind, KV format and option, on
awkward sizes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

from treadle.formats import FORMATS, by_name
from treadle.formats.mlx import BITS, GROUPS, SCALES, mlx
from treadle.kernels.attention.hadamard import Rotate
from treadle.kernels.attention.indexer import Choose, IndexScores, IndexStore
from treadle.kernels.attention.latent_steps import LatentStore, PackHeads
from treadle.kernels.attention.merge_splits import Merge
from treadle.kernels.attention.paged import Attention
from treadle.kernels.attention.relative_logits import RelativeLogits
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.attention.row_attention import RowAttention, RowChoice, RowScores
from treadle.kernels.attention.row_pages import RowStore, TurnHeads
from treadle.kernels.elementwise.add import Add, AddRows
from treadle.kernels.elementwise.altup import (
    AddBeside,
    CopyColumns,
    Correct,
    Join,
    Laurel,
    Predict,
    SpreadStreams,
)
from treadle.kernels.elementwise.attention_residuals import AttentionResidual
from treadle.kernels.elementwise.clamp import Clamp, ClampBetween
from treadle.kernels.elementwise.column_norm import ColumnNorm
from treadle.kernels.elementwise.control_vectors import AddDirections
from treadle.kernels.elementwise.elementwise import SLICE, Embed, Norm, Pack
from treadle.kernels.elementwise.fill import Hide
from treadle.kernels.elementwise.gated_streams import SpreadToStreams, SumStreams
from treadle.kernels.elementwise.manifold import BlendStreams, StreamWeights, WeighStreams
from treadle.kernels.elementwise.media_rows import MediaRowsKernel
from treadle.kernels.elementwise.ngram import GatherRows, NgramRows
from treadle.kernels.elementwise.scale import ScaleByExpert, ScaleColumns, Temper
from treadle.kernels.elementwise.softcap import Softcap
from treadle.kernels.elementwise.sparse_gate import SparseGate
from treadle.kernels.elementwise.streams import (
    AddToStreams,
    MixStreams,
    NormStreams,
    OutputCopy,
    RepeatStreams,
    ScoreStreams,
)
from treadle.kernels.elementwise.top_logits import JoinTop, TopLogitsKernel
from treadle.kernels.elementwise.xielu import Xielu
from treadle.kernels.matmul.gemm import Gemm
from treadle.kernels.matmul.gemv import Gemv, GroupGemv
from treadle.kernels.matmul.lora import LoraDown, LoraUp
from treadle.kernels.matmul.lora_experts import ExpertAdapterWeights, ExpertDown, ExpertUp
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.matmul.matrix_words import WordsMatrixGemm
from treadle.kernels.matmul.tile_ordered import OrderedGemm
from treadle.kernels.matmul.vector_bytes import LanesGemm
from treadle.kernels.matmul.vector_floats import FloatLanes
from treadle.kernels.moe.dispatch import PIECE, Combine, Gather
from treadle.kernels.moe.route import Route, RouteByToken, Sort
from treadle.kernels.quantize.codebook import PointSearchKernel
from treadle.kernels.quantize.k_search import SearchKernel
from treadle.kernels.quantize.ladder import LadderSearchKernel
from treadle.kernels.quantize.offset import OffsetSearchKernel
from treadle.kernels.quantize.signed import SignedSearchKernel
from treadle.kernels.recurrent.block_convolution import BlockConvolution
from treadle.kernels.recurrent.chunked import Chunked, ChunkedDelta, ChunkedMamba2
from treadle.kernels.recurrent.compress import Compress
from treadle.kernels.recurrent.convolution import Convolution
from treadle.kernels.recurrent.gates import OutputGate, Rates, SplitHalves, UnitHeads
from treadle.kernels.recurrent.kda import ChannelDelta, ChannelRates
from treadle.kernels.recurrent.mamba1 import Selective
from treadle.kernels.recurrent.rules import Delta, Mamba2
from treadle.kernels.recurrent.wkv import TokenShift, Wkv, WkvKeys, WkvOut
from treadle.kernels.spec import Spec

EPS = 1e-6
IK_NUMBERS = range(133, 160)  # ggml type numbers of ik_llama.cpp


def embed_widths(block: int) -> tuple[int, int]:
    """Awkward rows for blocks of this size: the narrowest, and one that no strip divides."""
    if block > 64:
        return block, 3 * block
    return max(32, block), 11 * max(32, block)


# Every width with every group. What the scales are is seen by one function alone: each width and
# each group meets all three.
MLX = [
    mlx(bits, group, list(SCALES)[(BITS.index(bits) + GROUPS.index(group)) % 3])
    for bits, group in product(BITS, GROUPS)
]
# Each width once, each group and kind of scale twice. All widths and groups are unpacked by one
# function, which embeddings and gemv meet with each of them; kernels of panels, which call it too,
# add what they do with the codes of a block.
MLX_PANELS = [MLX[len(GROUPS) * i + i % len(GROUPS)] for i in range(len(BITS))]
# The same of ik_llama.cpp's formats: one with a scale per block, one with a scale per row.
IK = [f for f in FORMATS.values() if f.ggml_id in IK_NUMBERS]
IK_PANELS = [by_name("IQ3_K"), by_name("IQ4_KS")]
OTHER_MAKERS = [f for f in FORMATS.values() if f not in IK]
PANELS = [*(f for f in OTHER_MAKERS if f.codes), *MLX_PANELS, *IK_PANELS]

EMBEDS = [
    *(Embed(f.name, k) for f in (*OTHER_MAKERS, *MLX) for k in embed_widths(f.block)),
    *(Embed(f.name, 3 * f.block) for f in IK),
    Embed("F32", 172),
    Embed("F16", 172, 2.5),
    Embed("BF16", 172),
    Embed("Q4_1", 64, 33.94),
    Embed("BF16", 172, 2.0, rows=5),
]
NORMS = [
    Norm("q8", 32, 1, EPS),
    Norm("q8", 352, 6, EPS),
    Norm("q8", 2048, 4, EPS, outputs=True),
    Norm("q8", 352, 6, EPS, unit=8),
    Norm("q8x2", 352, 1, EPS),
    Norm("q8x2", 2048, 1, EPS, outputs=True, centred=True),
    Norm("q16", 352, 4, EPS),
    Norm("q16n", 352, 4, EPS),
    Norm("q16x2", 352, 32, EPS),
    Norm("q16x2", 300, 16, EPS, centred=True, bias=True),
    Norm("q16", 2048, 1, EPS, outputs=True),
    Norm("bf16", 352, 32, EPS),
    Norm("bf16", 172, 32, EPS, outputs=True),
    Norm("bf16", 172, 1, EPS),
    Norm("bf16x2", 172, 32, EPS),
    Norm("bf16x2", 352, 6, EPS),
    Norm("bf16x3", 172, 32, EPS),
    Norm("bf16", 352, 6, EPS),
    Norm("f32", 172, 6, EPS),
    Norm("f32", 172, 32, EPS, outputs=True),
    Norm("f32", 352, 1, EPS, outputs=True),
    Norm("f32", 172, 1, EPS, add=True),
    Norm("f32", 2048, 1, EPS, add=True),
    Norm("f32", 5, 1, EPS),
    Norm("f32", 33, 1, EPS, add=True),
    # LayerNorm; with a bias, without a weight, in every layout.
    Norm("q8", 352, 6, EPS, centred=True, bias=True),
    Norm("q8", 2048, 1, EPS, centred=True),
    Norm("bf16", 172, 32, EPS, centred=True, weight=False, bias=True),
    Norm("bf16", 44, 6, EPS, outputs=True, centred=True, weight=False),
    Norm("f32", 5, 1, EPS, centred=True, bias=True),
    Norm("f32", 33, 1, EPS, add=True, centred=True, bias=True),
    Norm("f32", 172, 6, EPS, weight=False, bias=True),
    Norm("f32", 33, 1, EPS, centred=True, bias=True, rows=True),
    Norm("f32", 172, 1, EPS, add=True, gain=True),
]
PACKS = [
    Pack("copy", "q8", 32, 1),
    Pack("copy", "q8x2", 352, 1),
    Pack("silu", "q8x2", SLICE + 544, 6),
    Pack("copy", "q16", 32, 1),
    Pack("gelu", "q16n", 544, 4, gated=False),
    Pack("copy", "q16n", 256, 1),
    Pack("gelu", "q16x2", SLICE + 544, 32, gated=False),
    Pack("copy", "q16x2", 172, 32),
    Pack("silu", "q16", SLICE + 544, 4),
    Pack("gelu", "q16", 256, 1, gated=False),
    Pack("copy", "bf16", 172, 6),
    Pack("copy", "bf16", 172, 32),
    Pack("copy", "bf16x2", 172, 32),
    Pack("copy", "bf16x3", 172, 32),
    Pack("gelu", "bf16", SLICE + 32, 32),
    Pack("copy", "f32", 352, 1),
    Pack("silu", "q8", 352, 6),
    Pack("silu", "q8", 352, 6, unit=8),
    Pack("copy", "q8", 96, 4, 16, unit=8),
    Pack("silu", "bf16", 352, 1),
    Pack("silu", "f32", 172, 6),
    Pack("gelu", "f32", SLICE + 172, 32),
    Pack("gelu", "q8", 2048, 1),
    Pack("gelu", "bf16", 172, 1),
    Pack("gelu", "f32", SLICE + 172, 6),
    Pack("silu", "q8", SLICE + 32, 1),
    Pack("gelu_erf", "q8", 352, 6),
    # Without a gate.
    Pack("relu2", "q8", 352, 6, gated=False),
    Pack("relu", "f32", 172, 5, gated=False),
    Pack("relu2", "bf16", SLICE + 172, 32, gated=False),
    Pack("gelu", "f32", 172, 1, gated=False),
    Pack("gelu_erf", "f32", 172, 6, gated=False),
    Pack("gelu_quick", "f32", 172, 6, gated=False),
    # What is gated in rows of its own.
    Pack("gelu", "q8", 352, 6, apart=True),
    Pack("gelu", "f32", SLICE + 172, 1, apart=True),
]
ROPES = [
    RopeStore("norm", "f16", 4, 2, 8, 8, 8**-0.5),
    RopeStore("norm", "bf16", 8, 8, 48, 48, 1.0),
    RopeStore("norm", "q8_0", 8, 2, 64, 64, 0.125),
    RopeStore("neox", "f16", 4, 1, 256, 256, 0.0625, eps=EPS),
    RopeStore("neox", "q8_0", 4, 4, 32, 32, 0.25, eps=EPS, pool=1, table=1),
    RopeStore("neox", "bf16", 6, 2, 80, 32, 0.3, pool=2),  # 48 dims pass unturned
    RopeStore("norm", "f16", 3, 3, 20, 12, 0.5, eps=1e-5),
    RopeStore("neox", "f16", 2, 1, 32, 32, 0.5, eps=0.0),  # a norm all the same
    # Values of fewer dims, and of more; nothing to rotate; queries alone.
    RopeStore("neox", "f16", 6, 3, 48, 16, 0.5, head_dim_v=20),
    RopeStore("norm", "q8_0", 4, 2, 32, 32, 0.5, pool=1, head_dim_v=96),
    RopeStore("neox", "f16", 4, 2, 20, 0, 1.0),
    RopeStore("neox", "q8_0", 4, 2, 64, 0, 0.125, eps=EPS, head_dim_v=32),
    RopeStore("neox", "f16", 6, 2, 80, 32, 0.3, eps=EPS, table=1, queries_only=True),
    RopeStore("norm", "f16", 3, 3, 20, 0, 0.5, queries_only=True),
    RopeStore("neox", "f16", 6, 2, 80, 32, 0.3, table=1, q_table=2),
    # The norm behind the rotation.
    RopeStore("neox", "f16", 6, 2, 80, 32, 0.3, eps=EPS, norm_last=True),
    RopeStore("norm", "bf16", 3, 3, 20, 20, 0.5, eps=EPS, norm_last=True),
    RopeStore("neox", "q8_0", 4, 4, 32, 0, 0.25, eps=EPS, norm_last=True),
    # Values with a norm.
    RopeStore("neox", "f16", 4, 2, 512, 512, 1.0, eps=EPS, v_eps=EPS),
    RopeStore("neox", "q8_0", 4, 2, 32, 32, 1.0, eps=EPS, head_dim_v=96, v_eps=EPS),
]
COLUMN_NORMS = [
    *(ColumnNorm(k, EPS) for k in (5, 64, 1041)),
    ColumnNorm(7, EPS, heads=3),
    ColumnNorm(256, EPS, heads=2),
    # LayerNorm.
    *(ColumnNorm(k, EPS, centred=True, bias=True) for k in (5, 768, 1041)),
    ColumnNorm(64, EPS, heads=3, centred=True),
    ColumnNorm(7, EPS, heads=2, bias=True),
    # Weights of its own for each head.
    ColumnNorm(7, EPS, heads=3, own=True),
    ColumnNorm(64, EPS, heads=2, centred=True, own=True),
]
CLAMPS = [Clamp(5, 8.0), Clamp(64, 0.7), Clamp(1041, 8.0)]
CLAMPS_BETWEEN = [ClampBetween(5), ClampBetween(64), ClampBetween(1041)]
CAPS = [Softcap(n, cap, outputs=False) for n, cap in ((5, 30.0), (64, 1.5), (1041, 30.0))]
ROTATIONS = [Rotate(32, 3), Rotate(96, 2), Rotate(128, 2), Rotate(256, 1), Rotate(320, 1)]
# Of pages whose dims are turned, which vectors of a processor alone read.
ROPES_TURNED = [
    RopeStore("norm", "q4_0", 8, 2, 64, 64, 0.125),
    RopeStore("neox", "q4_0", 4, 2, 32, 32, 1.0, eps=EPS, head_dim_v=96, v_eps=EPS),
    RopeStore("neox", "q4_0", 2, 1, 256, 128, 1.0, eps=EPS, norm_last=True),
    RopeStore("norm", "q5_0", 8, 2, 64, 64, 0.125),
    RopeStore("neox", "q5_1", 4, 2, 32, 32, 1.0, eps=EPS, head_dim_v=96, v_eps=EPS),
    RopeStore("norm", "iq4_nl", 4, 2, 64, 32, 0.125, head_dim_v=32),
    RopeStore("norm", "q8_0-q4_0", 4, 2, 32, 32, 0.5, head_dim_v=64),
    RopeStore("neox", "q5_1-f16", 4, 2, 64, 64, 0.125),
]
ATTENTIONS_TURNED = [
    Attention("q4_0", 4, 1, 128, 4, 33, 1),
    Attention("q4_0", 4, 2, 96, 1, head_dim_v=64),
    Attention("q4_0", 2, 2, 32, 8),
    Attention("q4_0", 16, 1, 96, 1, pool=1, head_dim_v=64, latent=True),
    Attention("q4_0", 3, 1, 128, 2, 40, head_dim_v=96, latent=True),
    Attention("q4_0", 2, 1, 64, 1, head_dim_v=32, latent=True),
    Attention("q5_0", 4, 1, 128, 4, 33, 1),
    Attention("q5_1", 4, 2, 96, 1, head_dim_v=64),
    Attention("iq4_nl", 2, 2, 32, 8),
    Attention("q8_0-q5_1", 4, 2, 64, 2, head_dim_v=96),
    Attention("q5_1-bf16", 8, 2, 64, 3, 40),
    Attention("f16-iq4_nl", 4, 4, 48, 1, head_dim_v=32),
    Attention("q5_1", 16, 1, 96, 1, pool=1, head_dim_v=64, latent=True),
    Attention("iq4_nl-f16", 3, 1, 64, 2, head_dim_v=32, latent=True),
    Attention("q5_0", 2, 1, 64, 1, head_dim_v=32, latent=True),
]
SUMS = [
    *(Add(k) for k in (5, 64, 1041)),
    *(AddRows(k, by) for by in ("position", "type", "first") for k in (7, 64)),
]
MEDIA_ROWS = [
    *(MediaRowsKernel(k) for k in (5, 64, 1041)),
    *(MediaRowsKernel(k, 2 * k, add=True) for k in (5, 64, 1041)),
]
STREAMS: list[Spec] = [
    *(SpreadStreams(k, n) for k, n in ((7, 2), (1041, 4))),
    *(CopyColumns(k) for k in (5, 1041)),
    *(Join(k, n, first) for k, n in ((7, 2), (300, 4)) for first in (False, True)),
    *(Predict(*sizes) for sizes in ((7, 2, EPS), (300, 4, EPS), (256, 4, EPS, 4), (64, 3, EPS))),
    *(Correct(*sizes) for sizes in ((7, 2, EPS), (300, 4, EPS), (256, 4, EPS, 4), (64, 3, EPS))),
    *(AddBeside(*sizes) for sizes in ((7, 2, EPS), (300, 4, EPS), (256, 4, EPS, 4))),
    *(Laurel(*sizes) for sizes in ((7, EPS, 0.5), (300, EPS, 0.75), (256, EPS, 0.5, 4))),
]
SPARSE_GATES = [
    SparseGate("gelu", "q8", 352, 6, 1.5),
    SparseGate("gelu", "q8", 352, 6, 1.5, unit=8),
    SparseGate("gelu", "q16", SLICE + 544, 4, 1.0),
    SparseGate("gelu", "bf16", SLICE + 32, 32, -0.5, whole=True),
    SparseGate("silu", "f32", 172, 1, 1.5),
    SparseGate("gelu", "bf16x2", SLICE + 172, 32, 0.0),
]
ATTENTIONS = [
    Attention("f16", 8, 2, 64, 1),
    Attention("f16", 4, 4, 8, 4),
    Attention("f16", 20, 1, 16, 1),  # 20 heads on one key head: two groups of 10
    Attention("f16", 8, 1, 128, 1, 100, 1),
    Attention("f16", 4, 2, 20, 4),
    Attention("bf16", 6, 2, 80, 2, 40, 2),
    Attention("q8_0", 4, 1, 256, 4, 33, 1),
    Attention("q8_0", 2, 2, 32, 8),
    Attention("bf16", 3, 3, 48, 3, 1),
    # Both ways, in a window too; values of fewer dims, and of more.
    Attention("f16", 4, 2, 64, 4, causal=False),
    Attention("bf16", 6, 3, 48, 3, 20, 1, head_dim_v=20, causal=False),
    Attention("f16", 4, 1, 24, 2, head_dim_v=64),
    Attention("q8_0", 4, 2, 96, 1, 33, head_dim_v=64),
    Attention("q8_0", 4, 4, 32, 3, head_dim_v=160, causal=False),
    # Spans of tokens that see each other, in a window too.
    Attention("f16", 8, 2, 64, 4, spans=True),
    Attention("q8_0", 4, 2, 32, 1, spans=True),
    Attention("f32", 4, 4, 24, 2, 20, 1, spans=True),
    Attention("bf16", 6, 3, 48, 3, 4, 1, 20.0, spans=True),
    # Sinks.
    Attention("f16", 6, 2, 64, 2, sinks=True),
    Attention("q8_0", 8, 2, 32, 1, 33, 1, sinks=True),
    # Values that are keys.
    Attention("f16", 5, 1, 48, 1, head_dim_v=32, latent=True),
    Attention("q8_0", 16, 1, 96, 1, pool=1, head_dim_v=64, latent=True),
    Attention("bf16", 3, 1, 24, 2, 40, head_dim_v=16, latent=True),
    Attention("f32", 4, 1, 40, 2, head_dim_v=32, latent=True),
    # Gemma 4's wide heads.
    Attention("f16", 4, 1, 512, 2),
    Attention("q8_0", 2, 1, 512, 1),
    # ALiBi: heads that are a power of two and that are not, a window, a cap.
    Attention("f16", 8, 8, 64, 4, causal=False, alibi=8.0),
    Attention("q8_0", 12, 4, 32, 1, alibi=8.0),
    Attention("bf16", 6, 6, 20, 3, 20, 1, 20.0, causal=False, alibi=4.0),
    # Numbers by distance: past their reach and not, heads that share keys, a window, a cap.
    Attention("f16", 8, 8, 64, 4, causal=False, reach=128),
    Attention("q8_0", 12, 4, 32, 1, reach=21),
    Attention("bf16", 6, 6, 20, 3, 90, 1, 20.0, causal=False, reach=40),
    # Numbers of each query by distance: past their reach and not, a window of as many keys.
    Attention("f16", 8, 2, 64, 4, rel_extent=48),
    Attention("q8_0", 4, 4, 32, 1, 33, 1, rel_extent=33),
]
# On matrix registers: rows that fill them and that do not, scales, windows, a cap.
ATTENTIONS_MATRIX = [
    Attention("f16", 8, 2, 64, 8, matrix=True),
    Attention("f16", 4, 1, 256, 16, 100, 1, matrix=True),
    Attention("q8_0", 6, 2, 32, 5, matrix=True),
    Attention("bf16", 3, 3, 96, 40, 33, 3, matrix=True),
    Attention("f16", 4, 4, 32, 32, softcap=20.0, matrix=True),
    Attention("f16", 4, 2, 64, 20, matrix=True, causal=False),
    Attention("bf16", 6, 2, 96, 9, 21, 1, matrix=True, head_dim_v=64, causal=False),
    Attention("q8_0", 4, 1, 64, 16, matrix=True, head_dim_v=128),
    Attention("q8_0-bf16", 4, 1, 64, 16, matrix=True, head_dim_v=32),
    Attention("f16", 6, 2, 32, 20, 50, 1, matrix=True, sinks=True),
    Attention("f16", 4, 2, 64, 9, matrix=True, spans=True),
    Attention("bf16", 6, 2, 32, 5, 21, 1, matrix=True, spans=True),
]
# The same in 16-bit numbers; and rows that are no multiple of a product's, wide heads.
ATTENTIONS_WORDS = [
    *(replace(spec, matrix=False, words=True) for spec in ATTENTIONS_MATRIX),
    Attention("f16", 5, 5, 32, 7, words=True),
    Attention("bf16", 2, 1, 512, 20, words=True),
    # Towers: pages of f32, dims that no vector or pair of vectors divides.
    Attention("f32", 3, 3, 72, 64, causal=False, words=True),
    Attention("f16", 2, 1, 40, 9, head_dim_v=24, window=20, words=True),
    Attention("f32", 2, 2, 16, 33, head_dim_v=8, causal=False, window=40, words=True),
]
MERGES = [
    Merge(s.n_groups, s.heads, s.tokens, s.dims_v, s.pool, s.sinks)
    for s in (*ATTENTIONS, *ATTENTIONS_MATRIX, *ATTENTIONS_WORDS)
]
GEMMS = [
    Gemm("Q8_0", "q8", 352, 2, 4),
    Gemm("Q8_0", "q8", 32, 1, 6, bias=True),
    Gemm("Q8_0", "q8", 2048, 2, 2, segments=3, bias=True),
    Gemm("Q4_0", "q8", 352, 2, 5, residual=True),
    Gemm("Q4_1", "q8", 352, 2, 8, segments=2),
    Gemm("F32", "f32", 172, 2, 6, residual=True),
    Gemm("F16", "f32", 172, 1, 4, segments=2, bias=True, residual=True),
    Gemm("BF16", "f32", 32, 2, 3, outputs=True),
    Gemm("Q4_0", "f32", 64, 1, 4),
    Gemm("Q4_K", "f32", 512, 1, 4),
    Gemm("BF16", "bf16", 172, 2, 12, segments=2, bias=True),
    Gemm("F32", "bf16", 352, 1, 5),
    Gemm("Q4_1", "bf16", 96, 1, 4),
    Gemm("Q6_K", "bf16", 512, 2, 4, residual=True),
    Gemm("Q8_0", "q16", 352, 2, 4, segments=3, bias=True),
    Gemm("Q8_0", "q16", 2048, 2, 4, residual=True),
    Gemm("Q8_0", "q16", 1056, 1, 6, kc=512),
    Gemm("BF16", "q16", 172, 2, 4, outputs=True),
    Gemm("F16", "q16n", 172, 2, 4, outputs=True),
    Gemm("F16", "q16n", 1056, 2, 4, segments=3, bias=True),
    Gemm("F16", "q16n", 768, 1, 6, residual=True, kc=512),
    Gemm("F16", "q16n", 544, 4, 6),
    Gemm("IQ4_NL", "q16", 544, 2, 4, segments=2),
    Gemm("IQ4_XS", "q16", 768, 2, 4, bias=True),
    OrderedGemm("BF16", "bf16", 172, 2, 4, segments=2, bias=True),
    OrderedGemm("Q8_0", "bf16", 352, 4, 2, bias=True, kc=64),
    OrderedGemm("Q4_K", "bf16", 768, 1, 4, residual=True, kc=256),
]
# Panels of codes that scales are multiplied into; each of the formats that can also stands below.
FOLDED = [
    Gemm("Q3_K", "q8", 768, 2, 5, segments=2, folded=True),
    Gemm("Q3_K", "q8", 256, 1, 8, bias=True, folded=True),
    Gemm("Q2_K", "q8", 768, 2, 5, residual=True, folded=True),
    Gemm("Q2_K", "q8", 256, 1, 8, segments=2, folded=True),
    Gemm("Q2_K", "q8", 2048, 1, 6, bias=True, kc=512, folded=True),
]
GEMVS = [
    Gemv("Q8_0", "q8", 352, 4, 1, segments=3, bias=True),
    Gemv("Q8_0", "q8", 2048, 2, 3),
    Gemv("Q8_0", "q8", 32, 1, 5, residual=True),
    Gemv("Q8_0", "q16", 352, 4, 1, segments=3, bias=True, ahead=1024),
    Gemv("Q8_0", "q16", 2048, 4, 2, residual=True, ahead=2048),
    Gemv("Q8_0", "q16", 1056, 1, 4, outputs=True),
    Gemv("Q8_0", "q16", 32, 2, 3, bias=True),
    Gemv("Q4_0", "q8", 352, 4, 1, segments=2),
    Gemv("Q4_0", "q8", 32, 2, 2, bias=True, residual=True),
    Gemv("Q4_0", "q8", 352, 16, 1),
    Gemv("Q4_1", "q8", 352, 4, 1),
    Gemv("Q4_1", "q8", 64, 1, 7, outputs=True),
    Gemv("F32", "f32", 172, 4, 1, segments=2, bias=True),
    Gemv("F16", "f32", 172, 2, 4, residual=True),
    Gemv("BF16", "f32", 172, 1, 1),
    Gemv("F16", "f32", 2048, 4, 1),
    Gemv("F32", "f32", 5, 1, 2),
    Gemv("Q8_0", "q8", 352, 4, 1, segments=3, bias=True, ahead=2048),
    Gemv("Q4_0", "q8", 2048, 4, 2, residual=True, ahead=1024),
    Gemv("Q6_K", "q8", 768, 8, 1, segments=2, ahead=2048),
    Gemv("F16", "f32", 172, 4, 4, ahead=4096),
    Gemv("F16", "f32", 172, 2, 8, outputs=True, ahead=2048),
]


def _options(i: int, mr: int) -> dict[str, Any]:
    """Different ones for neighbours."""
    return ({"bias": True}, {"segments": 2}, {"residual": True}, {"mr": mr})[i % 4]


# Every other format once in each: blocks beside each other, and some that are left over.
KNOWN = {s.w for s in (*GEMMS, *GEMVS)}
OTHERS = [f for f in FORMATS.values() if f.name not in KNOWN and (f.codes or f.load)]
for i, f in enumerate(OTHERS):
    act, k = ("q8", 352 if f.block == 32 else 768) if f.codes else ("f32", 172)
    if f not in IK or f in IK_PANELS:
        GEMMS.append(Gemm(f.name, act, k, **{"mr": 1, "nr": 4, **_options(i, 2)}))
    GEMVS.append(Gemv(f.name, act, k, **{"mr": 2, "nr": 1, **_options(i + 1, 4)}))
for i, f in enumerate(MLX):  # several arrays a tensor: with every option and number of tokens
    n = (1, 2, 4)[(i + i // 3) % 3]
    GEMVS.append(Gemv(f.name, "q8", 11 * f.block, **{"mr": 2, "nr": n, **_options(i + 1, 4)}))
for i, f in enumerate(MLX_PANELS):
    GEMMS.append(Gemm(f.name, "q8", 11 * f.block, **{"mr": 1, "nr": 4, **_options(i, 2)}))
# Blocks with several scales, row by row, as the narrow vectors of AVX2 have them.
GEMVS += [
    Gemv("Q4_K", "q8", 768, 1, 1, segments=2),
    Gemv("Q4_K", "q8", 512, 2, 2, bias=True),
    Gemv("Q6_K", "q8", 768, 1, 2, residual=True),
    Gemv("Q5_K", "q8", 512, 1, 1, outputs=True),
    Gemv("Q3_K", "q8", 768, 1, 1),
    Gemv("Q2_K", "q8", 512, 1, 4, bias=True, ahead=2048),
]
# 256 values of K at a time: steps for 32 values and for 16, of whole pairs of blocks and with one
# left over; minimums, offsets, signs and none of them.
SPANS = [
    Gemv("Q4_K", "q8", 768, 1, 1, segments=2, spans=True),
    Gemv("Q4_K", "q8", 512, 1, 4, bias=True, spans=True),
    Gemv("Q4_K", "q8", 768, 16, 1, ahead=2048, spans=True),
    Gemv("Q5_K", "q8", 768, 2, 2, residual=True, spans=True),
    Gemv("Q5_K", "q8", 256, 1, 1, outputs=True, spans=True),
    Gemv("Q6_K", "q8", 768, 1, 1, spans=True),
    Gemv("Q6_K", "q8", 512, 2, 4, segments=2, spans=True),
    Gemv("Q3_K", "q8", 768, 1, 2, residual=True, spans=True),
    Gemv("Q2_K", "q8", 256, 1, 1, bias=True, spans=True),
    Gemv("Q2_K", "q8", 768, 2, 4, spans=True),
    Gemv("Q4_0", "q8", 512, 4, 1, segments=2, spans=True),
    Gemv("Q4_0", "q8", 768, 2, 4, residual=True, spans=True),
    Gemv("Q4_1", "q8", 256, 4, 2, bias=True, spans=True),
    Gemv("Q5_0", "q8", 768, 16, 1, spans=True),
    Gemv("Q5_1", "q8", 512, 1, 4, spans=True),
    Gemv("MXFP4", "q8", 512, 4, 1, ahead=1024, spans=True),
    Gemv("MXFP4", "q8", 256, 4, 2, spans=True),
    Gemv("IQ4_NL", "q8", 512, 4, 1, spans=True),
    Gemv("IQ4_NL", "q8", 256, 2, 4, residual=True, spans=True),
    Gemv("IQ4_XS", "q8", 768, 1, 1, spans=True),
    Gemv("IQ4_XS", "q8", 4352, 1, 4, spans=True),  # too many tokens for their sizes to be at hand
    Gemv("IQ4_XS", "q8", 512, 2, 2, bias=True, spans=True),
]
SPANS += [Gemv(f.name, "q8", 768, 1, 1 + i % 2, spans=True) for i, f in enumerate(IK)]
SPANS += [Gemv("IQ5_KS", "q8", 256, 2, 1, segments=2, spans=True)]
GEMVS += SPANS
# Four rows' scales in one register: minimums, offsets, signs; pairs of blocks and one left over.
GEMVS += [
    Gemv("Q4_1", "q8", 352, 4, 1, segments=2, ahead=1024),
    Gemv("Q4_1", "q8", 128, 4, 4, bias=True),
    Gemv("Q5_0", "q8", 352, 4, 2, residual=True),
    Gemv("Q5_1", "q8", 576, 4, 4, ahead=1024),
    Gemv("IQ4_NL", "q8", 352, 4, 1),
]
# Activations of two bytes: blocks beside each other and left over, codes with and without a sign,
# with offsets and minimums, scales for 32 and 16, and codes from grids.
TWO_BYTES = [
    Gemv("Q8_0", "q8x2", 352, 4, 1, segments=3, bias=True),
    Gemv("Q4_1", "q8x2", 576, 4, 1, segments=3, ahead=1024),
    Gemv("Q4_1", "q8x2", 64, 1, 7, outputs=True),
    Gemv("Q5_1", "q8x2", 352, 2, 4),
    Gemv("IQ4_NL", "q8x2", 352, 4, 1),
    Gemv("NVFP4", "q8x2", 768, 2, 1),
    Gemv("Q3_K", "q8x2", 768, 1, 2),
    Gemv("Q4_K", "q8x2", 768, 4, 1, bias=True),
    Gemv("Q6_K", "q8x2", 768, 4, 1),
    Gemv("IQ3_S", "q8x2", 512, 2, 1),
    Gemv("Q4_0", "q8x2", 768, 4, 1, segments=2, spans=True),
    Gemv("Q4_1", "q8x2", 256, 4, 2, bias=True, spans=True),
    Gemv("IQ4_NL", "q8x2", 256, 2, 2, residual=True, spans=True),
    Gemv("Q2_K", "q8x2", 256, 1, 1, bias=True, spans=True),
    Gemv("Q3_K", "q8x2", 768, 1, 2, residual=True, spans=True),
    Gemv("Q4_K", "q8x2", 768, 1, 1, segments=2, spans=True),
    Gemv("Q4_K", "q8x2", 512, 1, 4, spans=True),
    Gemv("Q6_K", "q8x2", 768, 1, 4, segments=2, spans=True),
    Gemv("IQ4_XS", "q8x2", 768, 1, 1, spans=True),
]
TWO_BYTES += [
    Gemv(f.name, "q8x2", 11 * f.block, 2, 1) for f in MLX if f.codes and f.codes.top > 127
]
GEMVS += TWO_BYTES
GEMMS += FOLDED
# Outer products: in i16 at once and in parts, in i32, with minimums, of K in parts.
OUTERS = [
    Gemm("Q8_0", "q8", 352, 4, 6, segments=3, bias=True, unit=1),
    Gemm("Q8_0", "q8", 32, 1, 3, unit=1),
    Gemm("Q4_0", "q8", 352, 8, 6, residual=True, unit=1),
    Gemm("Q4_1", "q8", 2048, 8, 6, kc=512, unit=1),
    Gemm("Q6_K", "q8", 2048, 1, 6, kc=512, unit=1),
    Gemm("Q2_K", "q8", 768, 2, 5, folded=True, unit=1),
    Gemm("Q3_K", "q8", 768, 2, 5, folded=True, unit=1),
]
for i, f in enumerate(PANELS):
    shape = {"mr": 2, "nr": 4, **_options(i, 8)}
    OUTERS.append(Gemm(f.name, "q8", 3 * max(f.block, 32), **shape, unit=1))
GEMMS += OUTERS
# Two rows by two tokens: tokens that fill vectors and that do not, minimums, of K in parts.
PAIRS = [
    Gemm("Q8_0", "q8", 352, 2, 6, segments=3, bias=True, unit=8),
    Gemm("Q8_0", "q8", 352, 2, 8, unit=8),
    Gemm("Q4_1", "q8", 2048, 1, 6, kc=512, unit=8),
    Gemm("Q2_K", "q8", 768, 2, 2, residual=True, folded=True, unit=8),
    Gemm("Q3_K", "q8", 768, 2, 8, folded=True, unit=8),
]
for i, f in enumerate(PANELS):
    shape = {"mr": 2, "nr": 4, **_options(i, 1)}
    PAIRS.append(Gemm(f.name, "q8", 3 * max(f.block, 32), **shape, unit=8))
GEMMS += PAIRS
# On matrix registers: eight vectors fill at least one of them, of whatever width.
MATRIX = [
    MatrixGemm("Q8_0", "bf16", 352, 8, 32),
    MatrixGemm("Q8_0", "bf16", 2048, 8, 32, segments=3, bias=True),
    MatrixGemm("Q4_K", "bf16", 768, 16, 32, residual=True),
    MatrixGemm("Q4_K", "bf16", 768, 8, 32, residual=True, kc=256),
    MatrixGemm("BF16", "bf16", 172, 16, 32, bias=True, kc=64),
    MatrixGemm("F16", "bf16x2", 172, 16, 32, bias=True, kc=64),
    MatrixGemm("F16", "bf16x2", 1056, 8, 32, residual=True),
    MatrixGemm("F32", "bf16x3", 172, 16, 32, bias=True, kc=64),
    MatrixGemm("F32", "bf16x3", 1056, 8, 32, residual=True),
    MatrixGemm("BF16", "bf16", 172, 8, 32, bias=True, outputs=True),
]
for i, f in enumerate(PANELS):
    made = {"mr": 8, "nr": 32, **_options(i, 16)}
    MATRIX.append(MatrixGemm(f.name, "bf16", 3 * max(f.block, 32), **made))
# As words of two bytes: spans of one step and of four, one alone in a part of K, half a pair.
WORD_BYTES = [
    WordsMatrixGemm("F16", "q16x2", 172, 16, 32, bias=True),
    WordsMatrixGemm("F16", "q16x2", 1056, 8, 32, residual=True),
    WordsMatrixGemm("F16", "q16x2", 1056, 8, 32, segments=3, bias=True, kc=512),
    WordsMatrixGemm("F16", "q16x2", 800, 16, 32, kc=256, outputs=True),
    WordsMatrixGemm("F16", "q16x2", 40, 8, 32),
]
GEMMS += [*MATRIX, *WORD_BYTES]
# The same for few tokens: rows of whole turns of products, of one and a part, of less than one.
BYTES = [
    BytesGemm("Q8_0", "q8", 352, 4, 16, segments=3, bias=True),
    BytesGemm("Q8_0", "q8", 2048, 4, 16, residual=True),
    BytesGemm("Q8_0", "q8", 96, 8, 16, segments=2),
    BytesGemm("Q6_K", "q8", 768, 8, 16, outputs=True),
    BytesGemm("Q4_K", "q8", 768, 4, 16),
    BytesGemm("Q4_1", "q8", 352, 1, 16),
]
for i, f in enumerate(PANELS):
    assert f.codes is not None
    if f.codes.top - f.codes.offset <= 127:
        k = (2 + 4 * (i % 2)) * max(f.block, 32)
        made = {"mr": 4, "nr": 16, **_options(i // 2, 8)}
        BYTES.append(BytesGemm(f.name, "q8", k, **made))
GEMMS += BYTES
LANES = [
    LanesGemm("Q8_0", "q8", 352, 4, 16, segments=3, bias=True),
    LanesGemm("Q8_0", "q8", 2048, 4, 8, residual=True),
    LanesGemm("Q8_0", "q8", 96, 8, 16, segments=2),
    LanesGemm("Q6_K", "q8", 768, 8, 8, outputs=True),
    LanesGemm("Q4_K", "q8", 768, 4, 16),
    LanesGemm("Q8_0", "q8", 2048, 4, 16, residual=True, groups=8),
    LanesGemm("Q4_K", "q8", 768, 8, 16, segments=3, bias=True, groups=2),
    *(
        LanesGemm(
            f.name,
            "q8",
            k=(2 + 4 * (i % 2)) * max(f.block, 32),
            mr=4,
            nr=8 + 8 * (i // 2 % 2),
            groups=1 + i // 2 % 2,
        )
        for i, f in enumerate(PANELS)
    ),
]
GEMMS += LANES
# Floats: whole lines of a row and a part of one, as they stand and widened.
FLOATS = [
    FloatLanes("F32", "f32", 352, 4, 32, segments=3, bias=True, groups=2),
    FloatLanes("F32", "f32", 37, 8, 8, residual=True),
    FloatLanes("F16", "f32", 172, 4, 32, groups=8),
    FloatLanes("F16", "f32", 37, 8, 8, segments=2),
    FloatLanes("BF16", "bf16", 172, 8, 32, residual=True, groups=2),
    FloatLanes("BF16", "bf16", 2048, 4, 8, outputs=True),
    FloatLanes("BF16", "f32", 37, 8, 32, bias=True),
    FloatLanes("F64", "f32", 64, 4, 8),
]
GEMMS += FLOATS
# Experts: softmax and sigmoid, with what chooses and does not weigh, in groups.
ROUTES = [
    Route(8, 2, "softmax"),
    Route(128, 8, "softmax", True),
    Route(37, 5, "softmax", True, 2.5, bias=True),
    Route(64, 6, "sigmoid", True, bias=True, n_groups=8, n_groups_used=3),
    Route(10, 3, "sigmoid", n_groups=5, n_groups_used=2),
    Route(12, 2, "softmax", scale=16.0, n_groups=3, n_groups_used=1),
    Route(4, 4, "softmax"),
    Route(8, 3, "softmax", True, own=True),
    Route(16, 2, "softmax", jitter=0.01),
    Route(37, 3, "softmax", jitter=0.25),
    Route(24, 5, "softmax", True, 0.05, per=2),
    Route(37, 5, "sqrt_softplus", True, 1.5, bias=True),
    Route(37, 5, "sigmoid", True, 8.0, bias=True, n_shared=2),
    Route(37, 5, "sigmoid", True, 8.0, True, n_shared=3, own_shared=True),
]
TOKEN_ROUTES = [
    RouteByToken(37, 5, "sqrt_softplus", True, 1.5),
    RouteByToken(8, 2, "sigmoid"),
]
SORTS = [
    Sort(8, 2, 4, 8),
    Sort(5, 1, 6, 6),
    Sort(128, 8, 24, 504, over=3),
    Sort(128, 8, 1, 4, upto=3),
    Sort(8, 2, 1, 4),
]
GATHERS = [
    Gather("q8", 96, 4, 32, 12),
    Gather("q8", 352, 6, 16, 6),
    Gather("q8", 352, 6, 16, 12, unit=8),
    Gather("q8", 96, 4, 32, 8, unit=8),
    Gather("q16", 352, 4, 32, 12),
    Gather("bf16", 172, 32, 32, 32),
    Gather("bf16x2", 172, 32, 32, 32),
    Gather("bf16x3", 172, 32, 32, 32),
    Gather("f32", 172, 5, 32, 10),
    Gather("f32", 172, 32, 32, 32),
]
COMBINES = [
    Combine(64, 8),
    Combine(PIECE + 37, 2, places=True, residual=True),
    Combine(2 * PIECE, 4, places=True, residual=True, shared=True),
    Combine(5, 1, residual=True, shared=True, gate=True),
    Combine(100, 2, shared=True),
    Combine(PIECE + 37, 2, places=True, residual=True, shared=True, mean=True),
]
EXPERTS = [
    Gemm("Q8_0", "q8", 352, 2, 4, segments=2, bias=True, experts=2),
    Gemv("Q4_0", "q8", 352, 4, 1, segments=2, experts=8),
    GroupGemv("Q4_0", "q8", 352, 1, 4, segments=2, experts=8, of_tokens=True, one_mr=4, two_mr=2),
    GroupGemv("Q4_1", "q8", 512, 1, 4, bias=True, experts=8, spans=True, two_spans=True),
    GroupGemv("Q8_0", "q16", 544, 1, 4, bias=True, experts=8, of_tokens=True, one_mr=4, two_mr=4),
    Gemv("Q8_0", "q8", 352, 4, 1, segments=2, bias=True, experts=8, ahead=2048),
    Pack("silu", "q8", 352, 6, per=12, counted=True),
    Pack("swiglu_clamped", "f32", 172, 1, per=4),
    Pack("silu_to_0.5", "q8", 352, 6, per=12),
    Pack("silu_to_0.25", "f32", 172, 1, per=4),
    Pack("situ_1.5_4", "f32", 172, 1, per=4),
]
LATENTS = [
    LatentStore("norm", "f16", 4, 48, 32, 40, 16, 0.2, EPS),
    LatentStore("norm", "q8_0", 5, 96, 64, 64, 32, 0.125, EPS, pool=1, table=1),
    LatentStore("neox", "bf16", 3, 28, 20, 12, 8, 0.3, EPS),
    LatentStore("none", "f16", 3, 48, 32, 40, 16, 0.2, EPS),
    LatentStore("norm", "f16", 3, 48, 32, 40, 16, 0.2, EPS, norms=False),
    LatentStore("none", "q4_0", 2, 64, 64, 32, 0, 0.2, EPS),
    LatentStore("neox", "f32", 2, 40, 32, 24, 8, 0.2, EPS),
    LatentStore("norm", "q4_0", 5, 160, 128, 64, 32, 0.125, EPS, pool=1, table=1),
    LatentStore("none", "q4_0", 2, 160, 96, 72, 64, 0.2, EPS),
]
INDEX_STORES = [
    IndexStore("neox", "f16", 3, 64, 16),
    IndexStore("norm", "f32", 5, 40, 24, first=16, pool=1, table=1),
    IndexStore("none", "q8_0", 0, 32, 0),
    IndexStore("neox", "q4_0", 2, 64, 32, first=32),
    IndexStore("neox", "f16", 2, 64, 32, back=True),
]
INDEX_SCORES = [
    IndexScores("f16", 6, 1, 64, 1, latent=True, scale=0.1, top=20),
    IndexScores("f32", 24, 1, 40, 1, pool=1, latent=True, top=6, unit=16, whole=True),
    IndexScores("q8_0", 3, 1, 32, 1, latent=True, weighted=False, scale=0.5),
    IndexScores("q4_0", 4, 1, 64, 1, latent=True, weighted=False, apart=True, top=2, unit=32),
]
CHOICES = [
    Choose(20),
    Choose(5, 8, whole=True),
    Choose(4, 24, local=2, planes=3),
    Choose(3, 64, local=1),
    Choose(5, 8, whole=True, dense=True),
]
ATTENTIONS_CHOSEN = [
    Attention("f16", 4, 1, 64, 2, head_dim_v=32, latent=True, chosen=1),
    Attention("f32", 6, 3, 32, 3, chosen=3),
    Attention("q8_0", 8, 2, 32, 1, chosen=1, sinks=False),
]
HYPER_STREAMS = [
    *(RepeatStreams(k, 3) for k in (64, 37)),
    *(OutputCopy(k) for k in (64, 37)),
    *(NormStreams(k, 3, EPS) for k in (64, 37)),
    *(MixStreams(k, 3) for k in (64, 37)),
    *(AddToStreams(k, 3, 0.25) for k in (64, 37)),
    *(ScoreStreams(k, 3) for k in (64, 37)),
    *(SumStreams(k, 3, 1e-3) for k in (64, 37)),
    *(SpreadToStreams(k, 3, 1.5, 1e-3) for k in (64, 37)),
    *(AttentionResidual(k, n, EPS) for k, n in ((64, 2), (37, 1))),
]
STREAM_WEIGHTS = [StreamWeights(4, 20, 1e-6), StreamWeights(3, 1, 1e-3), StreamWeights(3, 0, 0.0)]
MANIFOLDS = [
    *(WeighStreams(k, 3, mean=True) for k in (64, 37)),
    *(kind(k, n) for kind in (WeighStreams, BlendStreams) for k, n in ((64, 4), (37, 3))),
]
COMPRESSIONS = [Compress(96, 4, overlap=True), Compress(70, 8), Compress(128, 64)]
ROW_STORES = [
    RowStore("norm", "f16", 64, 16, EPS),
    RowStore("norm", "f32", 40, 24, EPS, 4, pool=1, table=1),
    RowStore("neox", "q8_0", 64, 32, EPS, 128),
    RowStore("norm", "q4_0", 96, 32, EPS, 4),
    RowStore("none", "f16", 64, 0, None, 16),
]
TURNED_HEADS = [
    TurnHeads("norm", 3, 40, 16, scale=0.3, eps=EPS),
    TurnHeads("norm", 2, 64, 32, table=1, inverse=True),
    TurnHeads("neox", 2, 64, 64, scale=0.5, hadamard=True),
    TurnHeads("norm", 3, 96, 32, inverse=True, hadamard=True),
]
ROW_ATTENTIONS = [
    RowAttention("f16", 6, 64, 12),
    RowAttention("f32", 4, 40, 12, block=True),
    RowAttention("f32", 4, 40, 40, unit=64, units=1),
    RowAttention("bf16", 16, 32, 12, unit=4, units=1, top=5),
    RowAttention("q8_0", 3, 64, 12, unit=4, units=1, top=5),
    RowAttention("q4_0", 2, 96, 12, unit=16, units=1),
]
ROW_SCORES = [
    RowScores("f16", 6, 64, 4, 5, 1, 0.1),
    RowScores("f32", 24, 40, 8, 2, 2, 0.1),
    RowScores("q8_0", 3, 32, 4, 5, 1),
]
ROW_CHOICES = [RowChoice(5, 4), RowChoice(3, 16)]
NGRAMS = [NgramRows(2, 3, 7), NgramRows(4, 2, 5)]
TABLE_GATHERS = [GatherRows("F32", 40, 3), GatherRows("Q8_0", 64, 2), GatherRows("Q4_K", 256, 1)]
RELATIVE_LOGITS = [RelativeLogits(3, 5, 37), RelativeLogits(2, 16, 64)]
TEMPERS = [Temper(96, 1), Temper(37, 0)]
TIMES = [ScaleColumns(96, 0.707), ScaleColumns(37, 2.0)]
WEIGHS = [ScaleByExpert(96, 16), ScaleByExpert(37, 5), ScaleByExpert(64, 1)]
PACK_HEADS = [
    PackHeads("q8", 64, 4, 5),
    PackHeads("q8", 352, 1, 2, sub=16, scale=0.125),
    PackHeads("q8", 96, 6, 3, unit=8),
    PackHeads("q16", 352, 4, 3),
    PackHeads("bf16", 172, 32, 3),
    PackHeads("f32", 44, 6, 4, scale=0.3),
    PackHeads("q8", 64, 8, 3, unit=8),
]
HEADS = [
    Gemm("Q8_0", "q8", 64, 1, 4, heads=3),
    Gemm("F32", "f32", 44, 2, 6, heads=2),
    Gemm("Q8_0", "q8", 64, 2, 8, heads=3, unit=8),
    Gemv("Q8_0", "q8", 64, 2, 1, heads=3),
    Gemv("F16", "f32", 44, 4, 3, heads=2),
    Gemv("Q8_0", "q8", 64, 4, 1, heads=3, ahead=2048),
]
CHUNKED: list[Chunked] = [
    ChunkedMamba2(2, 64, 32, 1),
    ChunkedMamba2(4, 32, 128, 2),
    ChunkedDelta(4, 32, 64, 2),
    ChunkedDelta(2, 64, 32, 1, grouped=True),
]
CHUNK_KEYS = [spec.keys for spec in CHUNKED]
STATES = [
    Convolution(5, 3, gates=True),
    Convolution(64, 4),
    Convolution(157, 4, bias=True),
    Convolution(96, 2, gates=True),
    Convolution(70, 3, dilation=3),
    Convolution(32, 5, plain=True),
    Convolution(70, 4, plain=True, residual=True),
    Convolution(33, 3, plain=True, residual=True, scaled=True),
    Mamba2(4, 32, 16, 1),
    Mamba2(6, 24, 5, 2),
    Mamba2(2, 80, 32, 2),
    Mamba2(6, 24, 5, 2, 2),
    Mamba2(2, 64, 32, 1, 4),
    Mamba2(2, 32, 16, 1, passing=True),
    Delta(4, 32, 16, 2),
    Delta(4, 64, 7, 2, grouped=True),
    Delta(3, 5, 32, 1),
    Delta(4, 64, 7, 2, 2),
    Delta(4, 32, 48, 2, 4, grouped=True),
    Delta(2, 48, 16, 2, passing=True),
    ChannelDelta(3, 32, 16, 3),
    ChannelDelta(2, 7, 21, 2),
    ChannelDelta(2, 64, 7, 2, 2),
    ChannelDelta(3, 48, 37, 3, 4),
    ChannelDelta(2, 32, 32, 2, 4),
    ChannelDelta(2, 48, 16, 2, passing=True),
    Rates(4),
    Rates(37, beta=True),
    Rates(5, beta=True, most=2.0),
    ChannelRates(3, 32),
    ChannelRates(37, 7),
    ChannelRates(3, 32, -5.0),
    ChannelRates(5, 16, most=2.0),
    UnitHeads(32, 3, 0.25, EPS),
    UnitHeads(7, 2, 1.0, EPS),
    OutputGate("sigmoid", 172),
    OutputGate("silu", 96, 3, EPS),
    OutputGate("silu", 70, 2, EPS, first=True),
    OutputGate("sigmoid", 96, 3, EPS),
    OutputGate("sigmoid", 96, 3, EPS, gain=2.0),
    Xielu(172),
    Xielu(96, 3),
    OutputGate("softplus", 172),
    OutputGate("softplus", 111, 3, one=True),
    OutputGate("sigmoid", 111, 3, one=True),
    SplitHalves(16, 4),
    SplitHalves(5, 3),
]
BLOCK_CONVOLUTIONS = [
    BlockConvolution(64, 3, 8),
    BlockConvolution(160, 2, 16),
    BlockConvolution(90, 4, 6),
    BlockConvolution(35, 1, 5),
]
SELECTIVES = [
    Selective(48, 16),
    Selective(37, 5),
    Selective(16, 17),
    Selective(41, 50),
]
WKVS: list[Spec] = [
    TokenShift(64, 6),
    TokenShift(157, 1),
    Wkv(2, 64, 64, 2),
    Wkv(3, 24, 24, 3),
    Wkv(2, 7, 7, 2),
    Wkv(2, 16, 16, 2, passing=True),
    WkvKeys(3, 32),
    WkvKeys(2, 7, mixed=True),
    WkvOut(2, 64, 64e-5),
    WkvOut(3, 7, 64e-5, gate=False),
    WkvOut(2, 24, 0.0, norm=False),
]
LORAS = [
    LoraDown("F32", 172),
    LoraDown("F16", 2048),
    LoraDown("BF16", 5),
    LoraUp("F32", 3, 3),
    LoraUp("F16", 3, 1),
    LoraUp("BF16", 3, 2),
]
DIRECTIONS = [AddDirections(64), AddDirections(37), AddDirections(320, 4)]
# Format, experts, those of a token, adapters, by tiles; width, groups, rows of tokens; strips.
EXPERT_LORAS = [
    ExpertAdapterWeights(3),
    ExpertDown("F32", 5, 2, 3, True, 172, 4, True),
    ExpertDown("F16", 5, 2, 3, True, 1024, 4, False),
    ExpertDown("BF16", 5, 2, 3, False, 5, 4, True),
    ExpertDown("F16", 5, 2, 3, False, 64, 4, False),
    ExpertUp("F32", 5, 2, 3, True, 3),
    ExpertUp("F16", 5, 2, 3, False, 2),
]
# Of any vocabulary: it is an argument.
HIDDEN = [Hide(5, 9), Hide(0, 3)]
TOPS = [TopLogitsKernel(), JoinTop(), Softcap(7, 30.0), Softcap(2561, 5.0), *HIDDEN]
# Both kinds, sub-blocks of 16 and of 32, with importances and without.
SEARCHES: list[SearchKernel] = [
    OffsetSearchKernel("Q4_K"),
    OffsetSearchKernel("Q2_K", aware=True),
    SignedSearchKernel("Q6_K", aware=True),
    SignedSearchKernel("Q3_K"),
    LadderSearchKernel("IQ4_XS"),
    PointSearchKernel("IQ3_S", aware=True),
    # Small blocks: one sub-block each.
    SignedSearchKernel("Q4_0", aware=True),
    OffsetSearchKernel("Q4_1", aware=True),
    LadderSearchKernel("IQ4_NL"),
    LadderSearchKernel("IQ4_NL", aware=True),
]
ALL: list[Spec] = [
    *EMBEDS,
    *NORMS,
    *PACKS,
    *ROPES,
    *COLUMN_NORMS,
    *ROTATIONS,
    *ROPES_TURNED,
    *ATTENTIONS_TURNED,
    *SUMS,
    *STREAMS,
    *SPARSE_GATES,
    *ATTENTIONS,
    *ATTENTIONS_MATRIX,
    *ATTENTIONS_WORDS,
    *dict.fromkeys(MERGES),
    *GEMMS,
    *GEMVS,
    *ROUTES,
    *SORTS,
    *TABLE_GATHERS,
    *COMBINES,
    *EXPERTS,
    *TOPS,
    *SEARCHES,
    *STATES,
    *BLOCK_CONVOLUTIONS,
    *SELECTIVES,
    *WKVS,
    *LATENTS,
    *HYPER_STREAMS,
    *STREAM_WEIGHTS,
    *MANIFOLDS,
    *COMPRESSIONS,
    *ROW_STORES,
    *TURNED_HEADS,
    *ROW_ATTENTIONS,
    *ROW_SCORES,
    *ROW_CHOICES,
    *TOKEN_ROUTES,
    *NGRAMS,
    *GATHERS,
    *INDEX_STORES,
    *INDEX_SCORES,
    *CHOICES,
    *ATTENTIONS_CHOSEN,
    *PACK_HEADS,
    *RELATIVE_LOGITS,
    *TEMPERS,
    *TIMES,
    *WEIGHS,
    *HEADS,
    *LORAS,
    *EXPERT_LORAS,
    *DIRECTIONS,
]


def name(spec: Spec) -> str:
    return spec.name
