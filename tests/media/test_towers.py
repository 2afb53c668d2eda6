"""Towers and projectors beside transformers' in float64."""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.matrix_rounding import limit
from tests.media.media_cases import (
    BY_NAME,
    CASES,
    SHARP,
    Case,
    file_of,
    off,
    opened,
    picture,
    prompts,
    truth_of,
)
from treadle.devices import open_device
from treadle.engine.step_slices import StepSlices
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF
from treadle.media.clip_config import read_clip
from treadle.media.families import FAMILIES, HF_NAMES, family_of, hf_names_of
from treadle.media.families.gemma3 import pooled
from treadle.media.families.qwen_vl import Qwen25Vl
from treadle.media.prepared import PreparedMedia
from treadle.media.projector import Projector, open_projector
from treadle.media.tower_engine import MOST_ROWS
from treadle.media.unsupported import UNSUPPORTED_PROJECTORS
from treadle.models.config import Config
from treadle.models.load import load_config
from treadle.models.towers.stages import ActivationStage, TowerStage

TOLERANCE = 1e-5  # a wrong activation is 1e-4 off, other mistakes 1e-2 and more
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
folders = pytest.mark.parametrize(
    "case", [case for case in CASES if case.folder], ids=lambda case: case.name
)


def check_rows(case: Case, projector: Projector, truth: dict[str, np.ndarray]) -> None:
    """Compare the rows of all prompts' pictures with the truth, deepstack's too."""
    n = 0
    allowed = limit(TOLERANCE, "F16", projector.towers["image"].engine.device.isa)
    n_deepstack = projector.family("image").n_deepstack
    for prefix, pictures in prompts(truth):
        made = [projector.prepare(each, case.max_rows) for each in pictures]
        rows = np.concatenate([projector.encode(each) for each in made])
        expected = truth[f"{prefix}{case.projected}"]
        width = expected.shape[-1]
        assert rows.dtype == np.float32
        assert rows.shape == (
            sum(each.n_rows for each in made),
            width * (1 + n_deepstack),
        )
        assert off(rows[:, :width], expected.reshape(-1, width)) < allowed
        for i in range(n_deepstack):
            at = width * (i + 1)
            beside = truth[f"{prefix}deepstack.{i}"]
            assert off(rows[:, at : at + width], beside) < allowed
        n += 1
    assert n >= 1
    assert n_deepstack == sum(name.startswith("deepstack.") for name in truth)


@every
def test_rows_are_those_of_transformers(case: Case, data: Path) -> None:
    for isa in {SHARP, None}:
        check_rows(case, opened(case, data, isa=isa), truth_of(case, data))


@folders
def test_rows_of_a_folder(case: Case, data: Path) -> None:
    """One table of names maps a Hugging Face folder: no second file. Its settings are the truth's,
    except of Gemma 4 12B, whose truth was resized by hand.
    """
    projector = opened(case, data, folder=True)
    own = case if case.name == "gemma4u" else case._replace(max_rows=None)
    check_rows(own, projector, truth_of(case, data))


@pytest.mark.parametrize("name", ["gemma4u"])
@pytest.mark.parametrize("folder", [False, True])
def test_rows_of_sound(name: str, folder: bool, data: Path) -> None:
    projector = opened(BY_NAME[name], data, folder=folder)
    assert projector.modalities == ("image", "audio")
    truth = truth_of(BY_NAME[name], data)
    made = projector.prepare(truth["input_features"].ravel(), None, "audio")
    assert off(projector.encode(made), truth["projected.sound"][0]) < TOLERANCE


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_states_are_those_of_transformers(name: str, data: Path) -> None:
    """The tower's own result, before the projector."""
    case = BY_NAME[name]
    truth = truth_of(case, data)
    projector = opened(case, data)
    tower = projector.towers["image"]
    made = projector.prepare(picture(), case.max_rows)
    tower.projectors = []
    tower.family.projectors = ()
    if name == "gemma3":
        expected = pooled(truth["tower"][0], made.inputs[0].grid, 4)
    else:
        expected = truth["tower"]
    assert off(projector.encode(made), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen25vl", "qwen3vl", "gemma4"])
@pytest.mark.parametrize("isa", ["avx2"])
def test_rows_on_another_instruction_set(name: str, isa: str, data: Path) -> None:
    case = BY_NAME[name]
    check_rows(case, opened(case, data, isa=isa), truth_of(case, data))


@every
def test_products_of_16_bit_numbers(case: Case, data: Path) -> None:
    """The default, where the machine has such products: off as with f16 pages, 1e-3 at most."""
    exact = opened(case, data)
    projector = opened(case, data, isa=None, exact=False)
    prepared = projector.prepare(picture(), case.max_rows)
    rows = projector.encode(prepared)
    most = 1e-7 if projector.towers["image"].engine.device.isa.dot_words is None else 1e-3
    assert off(rows, exact.encode(prepared)) < most


@pytest.mark.parametrize("isa", ["avx2"])
def test_both_kinds_of_products_are_of_16_bits(isa: str, data: Path) -> None:
    projector = opened(BY_NAME["gemma3"], data, isa=isa, exact=False)
    kernels = {step.spec.name for step in projector.towers["image"].engine.plan_for(256).plan.steps}
    assert any("q16n" in name for name in kernels)
    assert any(name.startswith("attention") and "words" in name for name in kernels)


def test_matrix_registers_multiply_words_of_two_bytes(data: Path) -> None:
    engine = opened(BY_NAME["gemma3"], data, isa=None, exact=False).towers["image"].engine
    matrix = engine.device.isa.matrix
    kernels = {step.spec.name for step in engine.plan_for(256).plan.steps}
    has_bytes = matrix is not None and matrix.dot_bytes is not None
    assert any("q16x2" in name for name in kernels) == has_bytes


# -- runs -------------------------------------------------------------------------------------


def joined(one: PreparedMedia, other: PreparedMedia) -> PreparedMedia:
    """Two pictures as the tiles of one."""
    n = one.n_rows + other.n_rows
    return replace(one, inputs=(*one.inputs, *other.inputs), n_rows=n)


@every
def test_pictures_share_a_run(case: Case, data: Path) -> None:
    """Pictures of one grid are items of one run, others have runs of their own; rows of one do not
    depend on the other.
    """
    projector = opened(case, data)
    tower = projector.towers["image"]
    one = projector.prepare(picture(), case.max_rows)
    mirrored = projector.prepare(np.ascontiguousarray(picture()[:, ::-1]), case.max_rows)
    turned = projector.prepare(np.ascontiguousarray(picture().swapaxes(0, 1)), case.max_rows)
    alone = [projector.encode(each) for each in (one, mirrored, turned)]
    assert off(alone[1], alone[0]) > 1e-2
    both = joined(one, mirrored)
    assert len(tower._runs(both.inputs)) == 1
    assert off(projector.encode(both), np.concatenate(alone[:2])) < TOLERANCE
    three = joined(both, turned)
    if turned.inputs[0].grid != one.inputs[0].grid:
        assert [len(each) for each in tower._runs(three.inputs)] == [2, 1]
    assert off(projector.encode(three), np.concatenate(alone)) < TOLERANCE


@pytest.mark.parametrize("isa", [None, "avx2"])
@every
def test_pictures_encoded_together_have_the_bits_of_each_alone(
    case: Case, isa: str | None, data: Path
) -> None:
    """Whatever else is in the run, and in the plan of whatever size."""
    projector = opened(case, data, isa=isa)
    mirrored = np.ascontiguousarray(picture()[:, ::-1])
    turned = np.ascontiguousarray(picture().swapaxes(0, 1))
    made = [
        projector.prepare(each, case.max_rows)
        for each in (picture(), mirrored, 255 - picture(), turned, picture()[::-1].copy())
    ]
    alone = [projector.encode(each) for each in made]
    for order in ([0, 1], [2, 0, 1, 4], [3, 1], [4, 3, 2, 1, 0]):
        together = all_finished(projector.encode_runs([made[i] for i in order]))
        for i, rows in zip(order, together, strict=True):
            assert np.array_equal(rows, alone[i]), (order, i)


def test_slices_of_larger_runs_are_not_longer(data: Path) -> None:
    """The seconds of an item were measured in a run of fewer rows of the same plan."""
    case = BY_NAME["qwen3vl"]
    projector = opened(case, data)
    made = projector.prepare(picture(), case.max_rows)
    projector.encode(made)
    plan = projector.towers["image"].engine.plan_for(60)

    def seconds(n_rows: int) -> list[float]:
        """Of the steps that ran; some have no items here."""
        found = (plan.slices._item_seconds(i, n_rows) for i in range(len(plan.plan)))
        return [each for each in found if each is not None]

    before = seconds(60)
    assert len(before) > 10
    assert seconds(240) == pytest.approx([4 * each for each in before])
    assert seconds(30) == before


def test_a_run_has_at_most_so_many_patches(data: Path) -> None:
    projector = opened(BY_NAME["gemma3"], data)
    tower = projector.towers["image"]
    (only,) = projector.prepare(picture(), None).inputs  # 256 patches
    assert [len(each) for each in tower._runs((only,) * 20)] == [16, 4]


def all_finished(runs: Generator[None, None, list[np.ndarray]]) -> list[np.ndarray]:
    while True:
        try:
            next(runs)
        except StopIteration as done:
            rows: list[np.ndarray] = done.value
            return rows


def finished(runs: Generator[None, None, list[np.ndarray]]) -> np.ndarray:
    (rows,) = all_finished(runs)
    return rows


def test_a_run_is_in_slices(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between slices others may use the device; the result is the same."""
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 0.0)  # one step a slice
    case = BY_NAME["qwen3vl"]
    projector = opened(case, data)
    made = projector.prepare(picture(), case.max_rows)
    expected = projector.encode(made)
    runs = projector.encode_runs([made])
    n = sum(1 for _ in runs)
    steps = len(projector.towers["image"].engine.plan_for(60).plan.steps)
    assert n >= steps - 1 > 10
    # a second run in between is of another tower, with the same device
    other = opened(BY_NAME["gemma3"], data)
    runs = projector.encode_runs([made])
    next(runs)
    other.encode(other.prepare(picture(), None))
    assert np.array_equal(finished(runs), expected)


def test_copies_of_many_rows_are_slices_of_their_own(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and behind the slices of the tower and of each projector; the result is the same."""
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 1e9)
    case = BY_NAME["qwen3vl"]
    projector = opened(case, data)
    made = projector.prepare(picture(), case.max_rows)
    expected = projector.encode(made)  # the speed of all steps is known
    assert not any(True for _ in projector.encode_runs([made]))  # one slice
    tower = projector.towers["image"]
    assert len(tower.projectors) > 1
    monkeypatch.setattr("treadle.media.tower_engine.LARGE", 0)
    runs = projector.encode_runs([made])
    n_yields = 0
    while True:
        try:
            next(runs)
        except StopIteration as done:
            (rows,) = done.value
            break
        n_yields += 1
    assert n_yields == 2 * (1 + len(tower.projectors))
    assert np.array_equal(rows, expected)


@pytest.mark.parametrize("name", ["qwen3vl", "gemma3"])
def test_inputs_of_a_grid_are_prepared_before_the_tower_runs(name: str, data: Path) -> None:
    """Interpolated positions take tenths of a second, which other requests would wait for."""
    case = BY_NAME[name]
    projector = opened(case, data)
    made = projector.prepare(picture(), case.max_rows)
    known = projector.towers["image"].grid_inputs.cache_info()
    assert known.currsize == len({each.grid for each in made.inputs})
    projector.encode(made)
    assert projector.towers["image"].grid_inputs.cache_info().misses == known.misses


@pytest.mark.parametrize("name", ["qwen25vl", "gemma4"])
def test_long_steps_are_run_in_parts(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as whole ones. Once the steps' speed is known, short ones are run together."""
    case = BY_NAME[name]
    projector = opened(case, data, isa=None)
    made = projector.prepare(picture(), case.max_rows)

    def whole(self: StepSlices, n_rows: int, step: int, item: int) -> tuple[int, int]:
        self._device.run(self.program)
        return self.program.n_steps, 0

    with monkeypatch.context() as patched:
        patched.setattr(StepSlices, "run", whole)
        expected = projector.encode(made)
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 0.0)  # small parts
    runs = projector.encode_runs([made])
    n_slices = sum(1 for _ in runs)
    n_rows = sum(len(each.patches) for each in made.inputs)
    engine = projector.towers["image"].engine
    program = engine.plan_for(n_rows).program
    n_steps = sum(engine.device.n_items(program, i) > 0 for i in range(program.n_steps))
    # An item is 256 rows on matrix registers: fewer of these steps have two.
    assert n_slices > (1.2 if engine.device.isa.matrix is not None else 1.5) * n_steps
    assert np.array_equal(finished(projector.encode_runs([made])), expected)
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 1e9)
    assert not any(True for _ in projector.encode_runs([made]))  # one slice
    assert np.array_equal(projector.encode(made), expected)


def test_encodings_take_turns(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second encoding yields until the first has ended, or is given up."""
    monkeypatch.setattr("treadle.engine.step_slices.SLICE_S", 0.0)
    case = BY_NAME["qwen3vl"]
    projector = opened(case, data)
    pictures = [projector.prepare(each, 16) for each in (picture(), picture(50, 120))]
    expected = [projector.encode(each) for each in pictures]
    first, second = (projector.encode_runs([each]) for each in pictures)
    found: dict[int, np.ndarray] = {}
    waiting = {0: first, 1: second}
    while waiting:
        for i, runs in list(waiting.items()):
            try:
                next(runs)
            except StopIteration as done:
                (found[i],) = done.value
                del waiting[i]
    assert all(np.array_equal(found[i], expected[i]) for i in range(2))
    given_up = projector.encode_runs([pictures[0]])
    next(given_up)
    given_up.close()
    assert np.array_equal(projector.encode(pictures[1]), expected[1])


def test_threads_take_turns(data: Path) -> None:
    case = BY_NAME["qwen3vl"]
    projector = opened(case, data)
    pictures = [projector.prepare(each, 16) for each in (picture(), picture(50, 120))]
    expected = [projector.encode(each) for each in pictures]
    equal: list[bool] = []

    def encode(i: int) -> None:
        for _ in range(5):
            equal.append(np.array_equal(projector.encode(pictures[i]), expected[i]))

    threads = [threading.Thread(target=encode, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 10


def test_plans_are_kept(data: Path) -> None:
    """One for each size class; a larger one moves the others to its arena."""
    case = BY_NAME["qwen3vl"]
    projector = opened(case, data)
    engine = projector.towers["image"].engine
    small = projector.prepare(picture(), 16)
    expected = projector.encode(small)
    large = projector.prepare(picture(640, 480), 200)
    assert 256 < len(large.inputs[0].patches) <= 1024
    projector.encode(large)
    plans = dict(engine._ready)
    assert np.array_equal(projector.encode(small), expected)
    projector.encode(large)
    assert sorted(plans) == sorted(engine._ready)
    assert len(plans) == 2
    assert all(engine._ready[size] is plan for size, plan in plans.items())
    with pytest.raises(TreadleError, match=f"at most {MOST_ROWS}"):
        engine.plan_for(MOST_ROWS + 1)


def test_pages_hold_one_layer(data: Path) -> None:
    """Keys and values of all layers lie in the same place: a Gemma 3 would need 1 GB otherwise."""
    projector = opened(BY_NAME["gemma3"], data)
    engine = projector.towers["image"].engine
    (pool,) = engine.plan_for(256).inputs._cache.pools
    assert len(pool.layers) == 2
    assert pool.cell_bytes == pool.layout.layer_bytes
    assert {pool.layer_off(i) for i in pool.layers} == {0}


# -- traps ------------------------------------------------------------------------------------


def rows_of(projector: Projector, case: Case) -> np.ndarray:
    return projector.encode(projector.prepare(picture(), case.max_rows))


def test_the_merger_s_gelu_is_exact(data: Path) -> None:
    """llama.cpp takes the tanh form, which is 1.5e-4 off: far above the tolerance of the tests."""
    case = BY_NAME["qwen2vl"]
    projector = opened(case, data)
    truth = truth_of(case, data)["tower.pooled"]
    assert off(rows_of(projector, case), truth) < TOLERANCE
    tower = projector.towers["image"]
    (config,) = tower.family.projectors
    fns = [getattr(stage, "fn", "") for stage in config.stem]
    assert fns == ["", "gelu_erf", ""]
    wrong = replace(config, stem=tuple(_with_tanh(stage) for stage in config.stem))
    engine = tower.projectors[0]
    engine._ready.clear()
    engine.config = replace(wrong, optional=engine.config.optional, ignored=engine.config.ignored)
    assert 5e-5 < off(rows_of(projector, case), truth) < 1e-3


def _with_tanh(stage: TowerStage) -> TowerStage:
    return ActivationStage("gelu") if isinstance(stage, ActivationStage) else stage


def test_gemma_4_is_no_quick_gelu(data: Path) -> None:
    """Its files have no flag, which means quick GELU in others; the model's is the tanh form."""
    case = BY_NAME["gemma4"]
    gguf = file_of(case, data)
    assert not {"clip.use_gelu", "clip.use_silu"} & set(gguf.metadata)
    assert read_clip(gguf)["vision"].activation == "gelu_quick"
    assert opened(case, data).family("image").tower.arch.activation == "gelu"
    assert read_clip(file_of(BY_NAME["gemma3"], data))["vision"].activation == "gelu"
    assert read_clip(file_of(BY_NAME["qwen25vl"], data))["vision"].activation == "silu"


def test_gemma_3_s_file_is_not_the_checkpoint(data: Path) -> None:
    """The file's norm is one larger than the checkpoint's, and the matrix lies [vision, text]."""
    case = BY_NAME["gemma3"]
    truth = truth_of(case, data)["projected"][0]
    gguf = file_of(case, data)
    norm = gguf.tensors["mm.soft_emb_norm.weight"]
    smaller = (norm.dequantize() - 1).view(np.uint8)
    gguf.tensors["mm.soft_emb_norm.weight"] = replace(norm, file=smaller, offset=0)
    device = open_device("cpu", None, 1, None)
    assert off(rows_of(open_projector(gguf, device, exact=True), case), truth) > 0.1
    # as many rows as the file's pool gives: 2 x 2 patches each
    finer = opened(case, data, {"clip.vision.projector.scale_factor": 2})
    assert finer.prepare(picture(), None).n_rows == 64


def test_qwen3_s_epsilon_is_not_the_file_s(data: Path) -> None:
    """Files state the decoder's; the tower's is 1e-6."""
    case = BY_NAME["qwen3vl"]
    key = "clip.vision.attention.layer_norm_epsilon"
    assert np.array_equal(
        rows_of(opened(case, data, {key: 0.01}), case), rows_of(opened(case, data), case)
    )
    other = BY_NAME["gemma3"]  # whose files state its own
    assert (
        off(rows_of(opened(other, data, {key: 0.01}), other), rows_of(opened(other, data), other))
        > 1e-3
    )


def test_windows_are_smaller_at_the_borders(data: Path) -> None:
    """A window has 2 x 2 blocks here, each of 4 patches; the last row and column have fewer."""
    family = opened(BY_NAME["qwen25vl"], data).family("image")
    assert isinstance(family, Qwen25Vl)
    order, firsts = family._order((6, 10))  # 3 x 5 blocks
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert firsts == (0, 4, 8, 10, 12, 14)
    assert family.grid_inputs((6, 10)).windows == (0, 16, 32, 40, 48, 56)
    assert "qwen2vl" in family.decoders  # as its decoder's files say
    assert [bool(layer.window) for layer in family.tower.layers] == [True, False, True, False]


def test_without_windows_qwen2_5_is_wrong(data: Path) -> None:
    case = BY_NAME["qwen25vl"]
    projector = opened(case, data, {"clip.vision.window_size": 28 * 64})
    assert off(rows_of(projector, case), truth_of(case, data)["tower.pooled"]) > 0.1


def test_layers_without_windows_may_be_listed(data: Path) -> None:
    case = BY_NAME["qwen25vl"]
    keys = {"clip.vision.n_wa_pattern": 0, "clip.vision.wa_layer_indexes": [1, 3]}
    listed = opened(case, data, keys)
    assert np.array_equal(rows_of(listed, case), rows_of(opened(case, data), case))


# -- files ------------------------------------------------------------------------------------


def test_other_types_are_refused_by_name(data: Path) -> None:
    assert not set(UNSUPPORTED_PROJECTORS) & set(FAMILIES.names())
    for name, why in UNSUPPORTED_PROJECTORS.items():
        with pytest.raises(UnsupportedError) as refused:
            family_of(name, "mmproj.gguf")
        assert repr(name) in str(refused.value)
        assert why in str(refused.value)
    with pytest.raises(UnsupportedError, match="treadle does not know it"):
        opened(BY_NAME["gemma3"], data, {"clip.projector_type": "next_year"})
    with pytest.raises(UnsupportedError, match="'moshi' are not supported"):
        hf_names_of("moshi", "config.json")
    assert all(table.prefixes for table in HF_NAMES.all_constants())
    assert len(FAMILIES.all_constants()) == len(FAMILIES.names())


def test_a_model_of_text_is_no_projector(data: Path) -> None:
    device = open_device("cpu", None, 1, None)
    with pytest.raises(UnsupportedError, match="'gemma3': not a projector file"):
        open_projector(data / "media" / "gemma3" / "text.gguf", device)


@pytest.mark.parametrize(
    ("name", "tensor", "where"),
    [
        ("gemma3", "v.patch_embd.weight", "patch_embd.weight"),
        ("gemma3", "v.blk.1.ffn_up.weight", "blk.1.ffn_up.weight"),
        ("gemma3", "v.position_embd.weight", "position_embd.weight"),
        ("gemma3", "v.post_ln.weight", "post_ln.weight"),
        ("gemma3", "mm.soft_emb_norm.weight", "mm.soft_emb_norm.weight"),
        ("gemma3", "mm.input_projection.weight", "mm.input_projection.weight"),
        ("qwen3vl", "v.deepstack.1.fc2.weight", "deepstack.1.fc2.weight"),
        ("qwen3vl", "mm.2.weight", "mm.2.weight"),
        ("glm4v", "mm.up.weight", "mm.up.weight"),
        ("gemma4", "v.blk.0.attn_q.weight", "blk.0.attn_q.weight"),
        ("gemma4u", "v.patch_norm.2.weight", "patch_norm.2.weight"),
    ],
)
def test_a_missing_tensor_is_named(name: str, tensor: str, where: str, data: Path) -> None:
    gguf = file_of(BY_NAME[name], data)
    del gguf.tensors[tensor]
    with pytest.raises(FileError, match="missing") as refused:
        open_projector(gguf, open_device("cpu", None, 1, None))
    assert refused.value.where == where
    assert refused.value.path.endswith("mmproj.gguf")


@pytest.mark.parametrize(
    ("name", "tensor", "like"),
    [
        ("gemma3", "v.pre_ln.weight", "v.post_ln.weight"),
        ("gemma3", "v.class_embd", "v.post_ln.weight"),
        ("glm4v", "v.pre_ln.weight", "v.post_ln.weight"),
        ("gemma4", "v.post_ln.weight", "v.blk.0.ln1.weight"),
        ("qwen25vl", "v.blk.1.ls1.weight", "v.post_ln.weight"),
    ],
)
def test_a_tensor_that_nothing_reads(name: str, tensor: str, like: str, data: Path) -> None:
    """It would change the rows: the model is another one."""
    gguf = file_of(BY_NAME[name], data)
    gguf.tensors[tensor] = replace(gguf.tensors[like], name=tensor)
    with pytest.raises(FileError, match="nothing reads this tensor"):
        open_projector(gguf, open_device("cpu", None, 1, None))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gemma3", "v.patch_embd.weight"),
        ("gemma3", "v.blk.1.ffn_up.weight"),
        ("gemma3", "v.position_embd.weight"),
        ("gemma3", "mm.soft_emb_norm.weight"),
        ("qwen3vl", "v.deepstack.1.fc2.weight"),
        ("qwen2vl", "mm.2.bias"),
        ("glm4v", "mm.up.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name: str, tensor: str, data: Path) -> None:
    gguf = file_of(BY_NAME[name], data)
    of = gguf.tensors[tensor]
    shape = (of.shape[0] // 2, *of.shape[1:-1], 2 * of.shape[-1])
    n_bytes = of.n_bytes
    if len(of.shape) == 1:
        shape = (of.shape[0] // 2,)
        n_bytes //= 2
    gguf.tensors[tensor] = replace(of, shape=shape, n_bytes=n_bytes)
    with pytest.raises(FileError, match="shape"):
        open_projector(gguf, open_device("cpu", None, 1, None))


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"clip.vision.embedding_length": 0}, "clip.vision.embedding_length: is 0"),
        (
            {"clip.vision.embedding_length": None},
            "clip.vision.embedding_length: the key is missing",
        ),
        ({"clip.vision.patch_size": "14"}, "clip.vision.patch_size: is '14'"),
        ({"clip.vision.image_mean": [0.5, 0.5]}, "three numbers"),
        ({"clip.vision.image_std": [0.5, 0.5, 0.0]}, "three numbers"),
        ({"clip.has_vision_encoder": False}, "neither a picture nor a sound encoder"),
        ({"clip.vision.block_count": 100000}, "clip.vision.block_count"),
        ({"clip.vision.image_size": 225}, "image_size 225"),
        ({"clip.vision.projector.scale_factor": 3}, "image_size 224"),
    ],
)
def test_damaged_keys_are_named(keys: dict[str, object], match: str, data: Path) -> None:
    with pytest.raises(FileError, match=match):
        opened(BY_NAME["gemma3"], data, keys)


def decoder(case: Case, data: Path) -> Config:
    from treadle.files.gguf import open_gguf

    return load_config(open_gguf(data / "media" / case.name / "text.gguf"))


@every
def test_it_fits_its_decoder(case: Case, data: Path) -> None:
    projector = opened(case, data)
    config = decoder(case, data)
    projector.check(config)
    with pytest.raises(TreadleError, match=f"rows have 64 values; the model's have {64 * 2}"):
        projector.check(replace(config, n_embd=128))
    with pytest.raises(TreadleError, match="this model is llama"):
        projector.check(replace(config, arch=replace(config.arch, name="llama")))


def test_a_closed_projector(data: Path) -> None:
    projector = opened(BY_NAME["gemma3"], data)
    made = projector.prepare(picture(), None)
    projector.close()
    with pytest.raises(TreadleError, match="closed"):
        projector.encode(made)


def test_a_file_that_changed_is_told(data: Path, tmp_path: Path) -> None:
    import os
    import shutil

    path = tmp_path / "mmproj.gguf"
    shutil.copy(data / "media" / "gemma3" / "mmproj.gguf", path)
    path.chmod(0o600)
    projector = open_projector(path, open_device("cpu", None, 1, None))
    made = projector.prepare(picture(), None)
    projector.encode(made)
    os.utime(path, (1, 1))
    with pytest.raises(FileError):
        projector.towers["image"].engine.gguf.check(now=True)
    projector.close()


def test_names_of_tensors_of_a_folder(data: Path) -> None:
    """A tensor that the table lacks is refused, as it would be left out silently."""
    from treadle.files.safetensors import open_safetensors
    from treadle.media.hf_projector import HfProjector

    folder = data / "media" / "gemma3"
    weights = open_safetensors(folder)
    name, tensor = next(item for item in weights.tensors.items() if "fc1" in item[0])
    weights.tensors[name.replace("fc1", "fc3")] = tensor
    with pytest.raises(FileError, match="does not have this tensor"):
        HfProjector(folder, hf_names_of("gemma3", "config.json"), weights)


def test_a_folder_is_a_projector_file(data: Path) -> None:
    """The keys and names of a folder are those of the file that llama.cpp's converter makes."""
    for name in ("gemma3", "gemma4", "qwen3vl", "qwen35", "gemma4u"):
        case = BY_NAME[name]
        file = file_of(case, data)
        made = opened(case, data, folder=True).gguf
        assert isinstance(made, GGUF)
        assert set(made.tensors) == set(file.tensors)
        for tensor, found in made.tensors.items():
            assert np.array_equal(
                found.dequantize().ravel(), file.tensors[tensor].dequantize().ravel()
            ), tensor
        for key in ("embedding_length", "block_count", "patch_size", "attention.head_count"):
            theirs = file.metadata[f"clip.vision.{key}"]
            assert made.metadata.get(f"clip.vision.{key}", 0) == theirs
