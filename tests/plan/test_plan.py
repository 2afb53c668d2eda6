"""Plans: built without LLVM, checked, listed; and every step compared with its numpy twin."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treadle
from tests.conftest import WriteTiny
from tests.kernels.rows import MADE_UP
from tests.stepwise import walk
from treadle.devices.cpu.device import Cpu
from treadle.engine.batch import BatchItem
from treadle.files.gguf import open_gguf
from treadle.isa import ROWS
from treadle.isa.isa import Isa
from treadle.isa.portable import PORTABLE
from treadle.kernels.attention.rope import RopeStore
from treadle.kernels.elementwise.elementwise import Norm
from treadle.kernels.matmul.matmul import Matmul
from treadle.kernels.matmul.matrix import MatrixGemm
from treadle.kernels.matmul.matrix_bytes import BytesGemm
from treadle.kernels.run_state import GEMV_TOKENS, run_state
from treadle.kernels.spec import Args, Grid, Spec
from treadle.kvcache.cache import KVCache
from treadle.models.archs import STANDALONE
from treadle.models.graphs import GRAPHS
from treadle.models.load import load_config
from treadle.plan.plan import ALIGN, Buffer, Input, Plan, Step
from treadle.plan.weights import Weights

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")


def plan_of(
    path: Path, n_tokens: int, n_outputs: int, deterministic: bool = False, isa: Isa = PORTABLE
) -> Plan:
    gguf = open_gguf(path)
    config = load_config(gguf)
    device = Cpu(isa, 2)
    cache = KVCache(GRAPHS[config.arch.graph].pools(config), device, 4096)
    weights = Weights(gguf, device)
    output = next(iter(GRAPHS[config.arch.graph].outputs))
    return device.plan(
        config, weights, cache, n_tokens, n_outputs, deterministic=deterministic, output=output
    )


SIZES = (*((n, n) for n in GEMV_TOKENS), (512, 1), (512, 128))


def check_everything(path: Path, turn: int | None = None) -> None:
    """``turn``: each size is met by a deterministic plan or by one that is not, in turns; by both
    where it is not given.
    """
    for i, (n_tokens, n_outputs) in enumerate(SIZES):
        for deterministic in (False, True):
            if turn is not None and (i + turn) % 2 != deterministic:
                continue
            plan = plan_of(path, n_tokens, n_outputs, deterministic)
            plan.check()
            assert plan.tensors_used
            assert plan.arena_bytes < sum(b.n_bytes for b in plan.lifetimes())  # memory is shared


@pytest.mark.parametrize("arch", STANDALONE)
def test_every_plan_is_sound(arch: str, tiny: WriteTiny) -> None:
    """Pairs of an architecture and a size, of it and determinism, of both of these: each is met."""
    check_everything(tiny(arch, window=16, n_layer=7), STANDALONE.index(arch))


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_is_sound(fmt: str, tiny: WriteTiny) -> None:
    check_everything(tiny("llama", fmt))


@pytest.mark.parametrize(
    "name",
    [
        "stories260K.gguf",
        "babyllama105/babyllama105-Q4_0.gguf",
        "babyllama105/babyllama105-F16.gguf",
    ],
)
def test_real_models_are_sound(name: str, data: Path) -> None:
    check_everything(data / "models" / name)


@pytest.mark.parametrize("fmt", ["Q8_0", "BF16"])
def test_deterministic_plans_add_in_one_order(fmt: str, tiny: WriteTiny) -> None:
    """A prompt's products on matrix registers, a small batch's in vectors that add as these do;
    where nothing does, all in vectors. Attention is in vectors.
    """

    def ends(n_tokens: int, deterministic: bool, row: str = "amx_bf16") -> set[tuple[str, str]]:
        plan = plan_of(tiny("llama", fmt), n_tokens, 1, deterministic, ROWS[row])
        plan.check()
        words = [(step.spec.op, step.kernel.split("_")) for step in plan]
        return {(op, end) for op, of in words for end in ("matrix", "ordered") if end in of}

    products = {("gemm", "matrix"), ("gated", "matrix")}
    ordered = {("gemm", "ordered"), ("gated", "ordered")}
    assert ends(512, False) == {*products, ("attention", "matrix")}
    assert ends(16, False) == (products if fmt == "BF16" else set())
    for n_tokens in (1, 16):
        assert ends(n_tokens, True) == ordered
    assert ends(512, True) == {*products, ("gemm", "ordered")}  # of the one output
    for n_tokens in (1, 16, 512):
        assert ends(n_tokens, True, "sme") == ends(n_tokens, True, "avx512_vnni") == set()


def test_labels_are_gguf_stems(tiny: WriteTiny) -> None:
    labels = [step.label for step in plan_of(tiny("gemma3", window=16), 1, 1)]
    layer = [label.removeprefix("L2.") for label in labels if label.startswith("L2.")]
    assert layer == [
        "attn.norm",
        "attn.qkv",
        "attn.rope",
        "attn",
        "attn.merge",
        "attn.pack",
        "attn.output",
        "attn.output.post_norm",
        "ffn.norm",
        "ffn.gate_up",
        "ffn.gelu",
        "ffn.down",
        "ffn.down.post_norm",
    ]
    assert [label for label in labels if not label.startswith("L")] == [
        "token_embd",
        "output_norm",
        "output",
        "output.top",
        "output.top.join",
    ]


def test_attention_of_many_tokens_and_of_few(tiny: WriteTiny) -> None:
    """In a plan for many tokens both; where bits must not tell who is few, one for all."""

    def kernels(n_tokens: int, deterministic: bool = False) -> dict[str, str]:
        plan = plan_of(tiny("gemma3", window=16, n_layer=3), n_tokens, 1, deterministic)
        labels = ("L2.attn", "L2.attn.few", "L2.attn.merge")
        return {step.label: step.kernel for step in plan if step.label in labels}

    alone = kernels(1)
    beside = kernels(512)
    assert [*alone] == ["L2.attn", "L2.attn.merge"]
    assert [*beside] == ["L2.attn", "L2.attn.few", "L2.attn.merge"]
    assert beside["L2.attn.few"] == alone["L2.attn"] != beside["L2.attn"]
    assert kernels(512, True) == kernels(1, True) == {"L2.attn": beside["L2.attn"]}


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_two_bytes_are_for_qkv_and_the_output_matrix(arch: str, tiny: WriteTiny) -> None:
    """In plans for few tokens and in those of a prompt's only output; not where a token's bits must
    not depend on the batch.
    """
    path = tiny(arch, "Q4_1")
    isa = replace(PORTABLE, dot4_single=True)
    for n_tokens, deterministic, wanted in (
        (1, False, {"L0.attn.qkv", "output"}),
        (2, False, {"L0.attn.qkv", "output"}),
        (4, False, {"output"}),
        (512, False, {"output"}),
        (1, True, set[str]()),
    ):
        plan = plan_of(path, n_tokens, 1, deterministic, isa)
        products = [(step.label, step.spec) for step in plan if isinstance(step.spec, Matmul)]
        fine = {label for label, spec in products if spec.act == "q8x2"}
        assert {label for label in fine if label.startswith(("L0", "out"))} == wanted


def test_labels_are_found_by_pattern(tiny: WriteTiny) -> None:
    plan = plan_of(tiny(), 1, 1)
    assert [step.label for step in plan.match("L*.ffn.gate_up")] == [
        f"L{i}.ffn.gate_up" for i in range(3)
    ]
    assert plan.match("L9.*") == []


def test_embeddings_are_read_a_row_for_each_token(tiny: WriteTiny) -> None:
    """Expected, of tokens that are equally likely: never more than the whole matrix."""
    plan = plan_of(tiny("llama", "Q8_0"), 512, 1)
    (step,) = plan.match("token_embd")
    (width,), n_vocab = step.shape, plan.match("output")[0].shape[0]
    row = width // 32 * 34
    assert step.cost([(0, 1)]) == (row, 0)
    assert row * 7 < step.cost([(100, 8)])[0] < row * 8
    assert row * n_vocab // 2 < step.cost([(0, 512)])[0] < row * n_vocab


def listing(plan: Plan) -> str:
    """What ``treadle plan`` tells; tiles are a matter of tuning, so they are left out."""
    lines = [
        f"{step.label:20} {re.sub(r'_[mn]r[0-9]+', '', step.kernel):50} "
        f"{'x'.join(map(str, step.shape)):>8} {step.n_bytes:>6} bytes {step.n_flops:>6} flops  "
        f"{step.grid.count}"
        for step in plan
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_listing(arch: str, tiny: WriteTiny) -> None:
    """TREADLE_UPDATE_GOLDEN=1 writes the file anew; read the difference before you commit it."""
    fmt = "Q4_0" if arch == "llama" else "Q8_0"
    text = listing(plan_of(tiny(arch, fmt, n_layer=1, window=16), 1, 1))
    golden = GOLDEN / f"plan_{arch}_{fmt}.txt"
    if os.environ.get("TREADLE_UPDATE_GOLDEN") == "1":
        golden.write_text(text)
    assert text == golden.read_text()


# -- what check() must notice -------------------------------------------------------------------


def step(label: str, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> Step:
    words = [f"x{i}:in" for i in range(len(reads))] + [f"y{i}:out" for i in range(len(writes))]

    class Nothing(Spec):
        op = "nothing"
        args = Args(" ".join(words))

    args = dict(zip(Nothing.args.kinds, (*reads, *writes), strict=True))
    return Step(label, Nothing(), args, Grid(1))


def small() -> tuple[Plan, Buffer, Buffer]:
    a = Buffer("a", 2, 100)
    b = Buffer("b", 1, 64)
    plan = Plan(1, 1, [step("one", [], [a]), step("two", [a], [b]), step("three", [b])])
    plan.place()
    plan.check()
    return plan, a, b


def test_a_label_twice_is_noticed() -> None:
    plan, _, _ = small()
    plan.steps[2] = replace(plan.steps[2], label="one")
    with pytest.raises(AssertionError, match="label twice"):
        plan.check()


def test_a_read_before_the_write_is_noticed() -> None:
    plan, _, _ = small()
    plan.steps[:2] = plan.steps[1::-1]
    with pytest.raises(AssertionError, match="two reads a before"):
        plan.check()


def test_other_arguments_than_the_kernels_are_noticed() -> None:
    plan, a, b = small()
    for args, name in (({}, "x0"), ({"x0": b, "z": a}, "z")):
        plan.steps[2] = replace(plan.steps[2], args=args)
        what = rf"three: not given, or no argument: \['{name}'\]"
        with pytest.raises(AssertionError, match=what):
            plan.check()


def test_what_a_kernels_own_fields_ask_for_is_needed() -> None:
    norm = Norm("f32", 64, 1, 1e-5)
    assert norm.needs == {"x", "out", "stride", "w"}
    other = replace(norm, weight=False, add=True, bias=True)
    assert other.needs == {"x", "out", "stride", "residual", "bias"}
    rope = RopeStore("neox", "f16", 4, 2, 32, 32, 1.0)
    keys = {"pool", "k_column", "v_column", "page_bytes", "layer_off"}
    assert rope.needs == {"qkv", "stride"} | keys
    assert replace(rope, eps=1e-5).needs == rope.needs | {"q_norm", "k_norm"}
    assert replace(rope, eps=1e-5, queries_only=True).needs == {"qkv", "stride", "q_norm"}


def test_an_argument_that_is_none_is_not_there(tiny: WriteTiny) -> None:
    plan = plan_of(tiny(), 1, 1)
    for label, name in (
        ("L1.attn.norm", "w"),
        ("L1.attn.rope", "pool"),
        ("L1.ffn.down", "residual"),
    ):
        at = plan.steps.index(plan.match(label)[0])
        whole = plan.steps[at]
        plan.steps[at] = replace(whole, args={**whole.args, name: None})
        with pytest.raises(
            AssertionError, match=rf"{label}: not given, or no argument: \['{name}'\]"
        ):
            plan.check()
        plan.steps[at] = whole


def test_memory_shared_by_the_living_is_noticed() -> None:
    plan, a, b = small()
    assert plan.offsets[a] != plan.offsets[b]
    plan.offsets[b] = plan.offsets[a] + a.n_bytes - ALIGN
    with pytest.raises(AssertionError, match="share memory"):
        plan.check()


def test_a_count_of_nothing_that_a_run_is_given_is_noticed() -> None:
    plan, _, _ = small()
    plan.steps[2] = replace(plan.steps[2], grid=Grid(1, "n_attn_few1"))
    plan.inputs["attn_few"] = Input(np.dtype("i8"), (4, 2))
    with pytest.raises(AssertionError, match="three: no input attn_few1"):
        plan.check()
    plan.inputs["attn_few1"] = Input(np.dtype("i8"), (4, 2))
    assert plan.inputs["attn_few1"].n_bytes == 64
    plan.check()


def test_inputs_are_named(tiny: WriteTiny) -> None:
    """As outputs are: the fields of RUN_STATE that say where arrays are, and the pages."""
    plan = plan_of(tiny("gemma3", window=16, n_layer=6), 512, 128)
    counts = {name for name in run_state(2).names or () if name.startswith("n_")}
    others = {"loras", "part_pages"}  # of plans with adapters, of caches with units
    assert {*plan.inputs} == {*(run_state(2).names or ()), "pages", "masks"} - counts - others
    shapes = {name: given.shape for name, given in plan.inputs.items()}
    assert (shapes["tokens"], shapes["output_rows"], shapes["rope1"]) == (
        (512,),
        (128,),
        (512, 2, 16),
    )
    assert [*plan.outputs] == ["logits", "top"]


def test_a_tensor_that_nobody_uses_is_noticed() -> None:
    plan, _, _ = small()
    plan.tensors = frozenset({"x", "y", "z"})
    plan.tensors_used = {"x"}
    plan.tensors_ignored = frozenset({"z"})
    with pytest.raises(AssertionError, match=r"neither used nor ignored.*\['y'\]"):
        plan.check()
    plan.tensors_used |= {"y", "z"}
    with pytest.raises(AssertionError, match=r"both used and ignored: \['z'\]"):
        plan.check()


@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(1, 500)), max_size=20)
)
def test_buffers_that_live_at_once_never_share_a_byte(spans: list[tuple[int, int, int]]) -> None:
    reads: list[list[Buffer]] = [[] for _ in range(14)]
    writes: list[list[Buffer]] = [[] for _ in range(14)]
    for i, (first, length, size) in enumerate(spans):
        buffer = Buffer(str(i), 1, size)
        writes[first].append(buffer)
        reads[min(first + 1 + length, 13)].append(buffer)
    plan = Plan(1, 1, [step(str(i), reads[i], writes[i]) for i in range(14)])
    plan.place()
    plan.check()
    live = [
        sum(b.n_bytes for b, (i, j) in plan.lifetimes().items() if i <= n <= j) for n in range(14)
    ]
    assert max(live) <= plan.arena_bytes <= sum(b.n_bytes for b in plan.offsets)
    assert all(offset % ALIGN == 0 for offset in plan.offsets.values())


# -- compiled steps and their twins -------------------------------------------------------------


def batches(model: treadle.Model) -> list[list[BatchItem]]:
    """A chunk of a prompt, a single token far behind it, and both with a third text at once."""
    cache = model.engine.cache
    rng = np.random.default_rng(5)

    def ids(n: int) -> list[int]:
        return [int(i) for i in rng.integers(3, model.config.n_vocab, n)]

    long = cache.sequence()
    short = cache.sequence()
    for _ in range(2):  # far enough that decoding cuts the history into items and merges them
        model.engine.run([BatchItem(long, ids(300), 0)])
    return [
        [BatchItem(short, ids(37), 3)],
        [BatchItem(long, ids(1))],
        [BatchItem(long, ids(1)), BatchItem(cache.sequence(), ids(2), 2)],
        [
            BatchItem(long, ids(1)),
            BatchItem(short, ids(9), 0),
            BatchItem(cache.sequence(), ids(5), 5),
        ],
        [BatchItem(short, ids(40), 0), BatchItem(long, ids(4), 4)],
    ]


def check_steps(model: treadle.Model, what: str) -> set[type[Spec]]:
    """Returns the kinds of products that experts met."""
    met: set[type[Spec]] = set()
    for batch in batches(model):
        worst = max(walk(model.engine, batch), key=lambda compared: compared.error)
        assert worst.error <= 1, (what, worst.label, worst.kind, worst.error, len(batch))
        specs = [step.spec for step in model.engine._plan_of(batch).plan]
        met |= {type(s.product) for s in specs if isinstance(s, Matmul) and s.experts}
    model.close()
    return met


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "fmt", "kv", "head_dim_v"),
    [
        ("llama", "F32", "f32", 32),
        ("llama", "BF16", "bf16", 32),
        ("gemma3", "Q8_0", "q8_0", 32),
        ("gemma3", "Q8_0", "q8_0", 64),
        ("qwen2", "F16", "f16", 32),
        ("qwen2", "F16", "f16", 12),
    ],
)
def test_every_step_agrees_with_its_twin(
    arch: str, fmt: str, kv: str, head_dim_v: int, tiny: WriteTiny
) -> None:
    # gemma3: layer 5 sees everything
    path = tiny(arch, fmt, window=16, n_layer=6, head_dim_v=head_dim_v)
    model = treadle.load(path, threads=2, context=640, kv=kv, n_sequences=2)
    check_steps(model, f"{arch} {fmt} {kv} {head_dim_v}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "fmt", "sizes"),
    [
        ("qwen3moe", "Q8_0", {}),
        ("qwen2moe", "Q4_0", {"n_expert_shared": 1}),
        ("gpt-oss", "BF16", {}),
        ("deepseek2", "Q8_0", {"n_head": 16}),
        ("deepseek2", "F32", {"n_head": 5, "n_q_rank": 0}),
        ("glm4moe", "Q4_K", {"n_embd": 256, "n_ff_exp": 256, "n_layer": 2, "head_dim": 64}),
    ],
)
def test_every_step_of_experts_agrees_with_its_twin(
    arch: str, fmt: str, sizes: dict[str, int], tiny: WriteTiny
) -> None:
    path = tiny(arch, fmt, **{"n_expert": 7, "n_ff_exp": 64, **sizes})
    check_steps(treadle.load(path, threads=2, context=640, n_sequences=2), f"{arch} {fmt}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "fmt", "down"),
    [
        ("llama", "Q8_0", "F32"),
        ("llama", "Q4_0", "BF16"),
        ("llama", "F16", "Q8_0"),
        ("qwen3moe", "Q8_0", "F32"),
        ("qwen3moe", "F32", "Q4_0"),
    ],
)
def test_every_step_between_unlike_formats_agrees_with_its_twin(
    arch: str, fmt: str, down: str, tiny: WriteTiny
) -> None:
    """What one product writes is laid as the next one's format wants it."""
    sizes = {"n_expert": 7, "n_ff_exp": 64} if arch == "qwen3moe" else {}
    path = tiny(arch, fmt, formats=(("ffn_down", down),), n_layer=2, **sizes)
    check_steps(treadle.load(path, threads=2, context=640, n_sequences=2), f"{arch} {fmt}, {down}")


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_1"])
def test_every_step_of_experts_on_matrix_registers(
    fmt: str, tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are made of memory here: each expert's few tokens meet bytes, many meet bf16."""
    monkeypatch.setitem(ROWS, MADE_UP.name, MADE_UP)
    path = tiny("qwen3moe", fmt, n_expert=7, n_ff_exp=64, n_layer=2)
    model = treadle.load(path, threads=2, context=640, n_sequences=2, isa=MADE_UP.name)
    assert {BytesGemm, MatrixGemm} <= check_steps(model, fmt)


@pytest.mark.slow
def test_every_step_of_a_trained_model_agrees_with_its_twin(data: Path) -> None:
    path = data / "models" / "babyllama105" / "babyllama105-Q4_0.gguf"
    check_steps(treadle.load(path, threads=2, context=640, n_sequences=2), path.name)


def test_a_wrong_step_is_found_by_its_label(tiny: WriteTiny) -> None:
    """Bisecting: up to and with any label, the reference holds what the compiled run holds."""
    with treadle.load(tiny(), threads=1, kv="f32") as model:
        engine = model.engine
        seq = model.engine.cache.sequence()
        for label in ("token_embd", "L1.attn.qkv", "L2.ffn.down", "output"):
            parts = [BatchItem(seq, list(range(3, 23)))]
            plan, reference = engine.run_reference(parts, until=label)
            engine.cache.truncate(seq, 0)
            ready = engine._plan_of(parts)
            engine._prepare(ready, parts)
            n_steps = 1 + plan.steps.index(plan.match(label)[0])
            engine.device.run(ready.program, range(n_steps))
            engine.cache.truncate(seq, 0)
            (buffer,) = plan.steps[n_steps - 1].writes
            at = plan.offsets[buffer]
            found = ready.arena.read(at, 4 * 64).view(np.float32)
            expected = reference[at : at + 4 * 64].view(np.float32)
            assert np.abs(expected).max() > 0.1
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()
