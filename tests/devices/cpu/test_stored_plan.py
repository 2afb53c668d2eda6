"""Plans from disk: the same bits as plans that are lowered, and never those of something else."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import WriteTiny
from treadle.devices.cpu.device import Cpu
from treadle.devices.cpu.stored_plan import StoredPlan
from treadle.engine.batch import BatchItem
from treadle.engine.engine import Engine
from treadle.files import stored_entries
from treadle.files.gguf import open_gguf
from treadle.isa import choose
from treadle.jit.cache import checked_folder
from treadle.jit.host import host_features
from treadle.models.digest import _described
from treadle.models.load import load_config

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
# Experts, latent heads, states, windows, and layers that share keys.
STANDALONE = ("llama", "qwen3moe", "deepseek2", "mamba2", "gemma3", "gemma4", "bloom")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREADLE_PLANS", "1")
    plans = tmp_path / "plans"

    monkeypatch.setattr(stored_entries, "entries_folder", lambda: checked_folder(plans))
    return plans


def engine(path: Path, **settings: Any) -> Engine:
    gguf = open_gguf(path)
    device = Cpu(choose(host_features()), 1)
    return Engine(gguf, load_config(gguf), device, **{"n_ctx": 64, **settings})


def logits(engine: Engine) -> list[bytes]:
    """The bits of a prompt's logits, and of two tokens after it."""
    seq = engine.cache.sequence()
    runs = [IDS, [7], [8]]
    made = [engine.run([BatchItem(seq, ids)]).tobytes() for ids in runs]
    seq.close()
    return made


def are_stored(engine: Engine) -> set[bool]:
    plans = [ready.plan for ready in engine._ready.values()]
    return {isinstance(plan, StoredPlan) and not plan.is_lowered for plan in plans}


@pytest.mark.parametrize("arch", STANDALONE)
def test_same_bits(tiny: WriteTiny, arch: str) -> None:
    sizes = {"n_expert": 8, "n_ff_exp": 64} if "moe" in arch else {}
    path = tiny(arch, **sizes)
    first = engine(path)
    made = logits(first)
    again = engine(path)
    assert logits(again) == made
    assert (are_stored(first), are_stored(again)) == ({False}, {True})
    for key, ready in again._ready.items():
        plan = ready.plan
        lowered = first._ready[key].plan
        assert (len(plan), plan.first_masked) == (len(lowered), lowered.first_masked)
        assert plan.arena_bytes == lowered.arena_bytes
        assert [step.label for step in plan] == [step.label for step in lowered]
        assert plan.tensors_used == lowered.tensors_used
        plan.check()
    assert logits(again) == made  # lowered meanwhile


def test_a_plan_can_be_shown_without_a_run(tiny: WriteTiny) -> None:
    path = tiny()
    labels = [step.label for step in engine(path).plan(1)]
    plan = engine(path).plan(1)
    assert isinstance(plan, StoredPlan)
    assert plan.tensors == plan.tensors_used | plan.tensors_ignored
    assert [step.label for step in plan.match("*")] == labels


@pytest.mark.parametrize(
    "settings", [{"n_ctx": 96}, {"n_sequences": 2}, {"deterministic": True}, {"kv": "q8_0"}]
)
def test_other_settings_have_other_plans(tiny: WriteTiny, settings: dict[str, Any]) -> None:
    path = tiny()
    logits(engine(path))
    other = engine(path, **settings)
    logits(other)
    assert are_stored(other) == {False}


def test_a_file_that_was_written_again(tiny: WriteTiny, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny().read_bytes())
    logits(engine(path))
    path.write_bytes(tiny().read_bytes())
    again = engine(path)
    logits(again)
    assert are_stored(again) == {False}


def test_a_tensor_that_was_replaced_in_memory(tiny: WriteTiny) -> None:
    path = tiny()
    made = logits(engine(path))
    again = engine(path)
    norm = again.gguf.tensors["output_norm.weight"]
    halved = (norm.dequantize() / 2).view(np.uint8)
    again.gguf.tensors["output_norm.weight"] = replace(norm, file=halved, offset=0)
    assert logits(again) != made
    assert are_stored(again) == {False}


def shorter(data: bytes) -> bytes:
    return data[:-1]


def other_byte(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


@pytest.mark.parametrize("damage", [shorter, other_byte, lambda data: b"", lambda data: data[:40]])
def test_damaged_files(tiny: WriteTiny, folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tiny()
    made = logits(engine(path))
    for file in folder.iterdir():
        file.write_bytes(damage(file.read_bytes()))
    again = engine(path)
    assert logits(again) == made
    assert are_stored(again) == {False}
    last = engine(path)
    assert logits(last) == made
    assert are_stored(last) == {True}  # written anew


def test_a_kernel_that_is_gone(tiny: WriteTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny()
    made = logits(engine(path))
    monkeypatch.setattr("treadle.devices.cpu.device.load_cached", lambda *given: None)
    again = engine(path)
    assert logits(again) == made
    assert are_stored(again) == {False}


def test_plans_for_scarce_memory_are_lowered(
    tiny: WriteTiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They call the system at an address of this process."""
    monkeypatch.setattr(Cpu, "_is_scarce", lambda *given: True)
    path = tiny("qwen3moe", "Q8_0", n_expert=8, n_ff_exp=64)
    for _ in range(2):
        made = engine(path)
        plan = made.plan(1)
        assert plan.match("*.fetch")
        logits(made)
        assert are_stored(made) == {False}
    assert not folder.exists()


def test_switched_off(tiny: WriteTiny, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREADLE_PLANS", "0")
    logits(engine(tiny()))
    assert not folder.exists()


def test_a_folder_that_takes_nothing(tiny: WriteTiny, folder: Path) -> None:
    folder.write_text("a file")
    assert logits(engine(tiny()))


def test_the_oldest_are_removed(
    tiny: WriteTiny, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_entries, "MOST_FILES", 2)
    folder.mkdir()
    for age in range(3):
        old = folder / f"{age}.plan"
        old.write_bytes(b"")
        os.utime(old, (age, age))
    engine(tiny()).plan(1)
    names = {file.name for file in folder.iterdir()}
    assert len(names) == 2
    assert "2.plan" in names


def test_keys_do_not_depend_on_the_order_of_sets() -> None:
    one = frozenset(f"name{i}" for i in range(20))
    texts = ["\n".join(_described(each)) for each in (one, set(sorted(one)))]
    assert texts[0] == texts[1]
    assert list(_described(np.arange(3))) != list(_described(np.arange(4)))
    with pytest.raises(TypeError):
        list(_described(object()))
