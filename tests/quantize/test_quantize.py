"""Mixes as llama.cpp makes them; the user's rules; files that come out, or do not."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.convert.test_output import failing
from treadle.convert import writer as output
from treadle.convert.recipe import OutputTensor as Target
from treadle.convert.sources.source import FILE_TYPES
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, GGUFWriter, open_gguf
from treadle.files.tensor import Tensor
from treadle.formats import FORMATS, Format, by_name
from treadle.quantize import write as writing
from treadle.quantize.imatrix.matrix import ImatrixEntry, ImportanceMatrix
from treadle.quantize.mixes import ALIASES, MIXES
from treadle.quantize.plan import (
    Recipe,
    TypeRule,
    find_mix,
    format_by_name,
    make_recipe,
    nearest,
    parse_rule,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "llamacpp_mixes.json"
MODELS: dict[str, Any] = json.loads(GOLDEN.read_text())["models"]
ALIGN = 32


class Described(GGUF):
    """A model of which only the names and shapes of its tensors are known."""

    def __init__(self, metadata: dict[str, Any], shapes: dict[str, list[int]]) -> None:
        self.path = Path("described.gguf")
        self.metadata = metadata
        self.alignment = ALIGN
        self.tensors = {
            name: Tensor(
                name,
                tuple(shape),
                0,
                by_name("F32"),
                4 * math.prod(shape),
                self.path,
                0,
                np.empty(0, np.uint8),
            )
            for name, shape in shapes.items()
        }


def described(model: dict[str, Any]) -> Described:
    shapes = dict(model["outer"])
    n_layer = next(v for k, v in model["metadata"].items() if k.endswith("block_count"))
    for i in range(n_layer):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in model["layer"].items()}
    return Described(model["metadata"], shapes)


def unrolled(types: str) -> Iterator[tuple[str, list[str]]]:
    for word in types.split():
        name, _, runs = word.partition("=")
        kinds = []
        for run in runs.split(","):
            kind, _, count = run.partition("*")
            kinds += [kind] * int(count or 1)
        yield name, kinds


def llama_cpps(target: Target) -> str:
    """The format; where ours stands in for one that does not fit, llama.cpp's of the same size."""
    wanted = target.instead_of.name if target.instead_of else ""
    other = wanted in {"Q2_K", "Q3_K"} and target.type.name == "IQ4_NL"
    return "Q4_0" if other else target.type.name.upper()


def test_what_stands_in_for_another_has_the_size_of_llama_cpps() -> None:
    made = described(MODELS["rows32"])
    recipe = make_recipe(made, find_mix("Q3_K_M"))
    assert {pair: len(targets) for pair, targets in recipe.fallbacks.items()} == {
        ("Q3_K", "IQ4_NL"): 33,
        ("Q5_K", "Q5_1"): 2,
        ("Q4_K", "Q5_0"): 22,
    }
    assert by_name("Q4_0").row_bytes(288) == by_name("IQ4_NL").row_bytes(288)


@pytest.mark.parametrize(
    ("fmt", "k", "expected"),
    [
        ("Q2_K", 576, "IQ4_NL"),
        ("Q3_K", 640, "IQ4_NL"),
        ("Q4_K", 576, "Q5_0"),
        ("Q5_K", 576, "Q5_1"),
        ("Q6_K", 640, "Q8_0"),
        ("IQ3_S", 576, "IQ4_NL"),
        ("TQ2_0", 576, "Q2_0"),  # ternary too, with blocks of 64
        ("TQ1_0", 288, "Q4_0"),
        ("Q3_K", 264, "F16"),
        ("Q3_K", 512, "Q3_K"),
    ],
)
def test_fallbacks(fmt: str, k: int, expected: str) -> None:
    assert nearest(by_name(fmt), k).name == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_mix_is_llama_cpps(model: str) -> None:
    known = MODELS[model]
    made = described(known)
    ones = ImportanceMatrix({})
    compared = 0
    for case, types in known["types"].items():
        name = case.removesuffix("+imatrix")
        with_imatrix = case.endswith("+imatrix")
        if types == "the same":
            types = known["types"][name]
        recipe = make_recipe(made, find_mix(name), imatrix=ones if with_imatrix else None)
        found = {t.tensor.name: llama_cpps(t) for t in recipe.targets}
        for tensor, kinds in unrolled(types):
            names = (
                [tensor] if tensor in found else [f"blk.{i}.{tensor}" for i in range(len(kinds))]
            )
            assert [found[n] for n in names] == kinds, (case, tensor)
            compared += len(names)
    assert compared > 60 * 20


def test_file_types_are_llama_cpps() -> None:
    numbers = {
        kind.name.removeprefix("MOSTLY_").removeprefix("ALL_"): int(kind)
        for kind in gguf.LlamaFileType
    }
    shared = MIXES.keys() & numbers.keys()
    assert len(shared) > 30
    assert {name: MIXES[name].file_type for name in shared} == {n: numbers[n] for n in shared}


def test_file_types_of_convert_are_those_of_the_mixes() -> None:
    named = {name: MIXES[ALIASES.get(name, name)].file_type for name in FILE_TYPES}
    assert named == FILE_TYPES
    assert {fmt.name for fmt in FORMATS.values()} - FILE_TYPES.keys() == {"F64"}


def test_every_format_in_a_mix_is_one_that_ggml_has() -> None:
    names = {fmt for mix in MIXES.values() for row in mix.choices.values() for fmt, _ in row}
    names |= {mix.base for mix in MIXES.values()}
    for name in names - {"Q2_0"}:  # newer than the table of ggml's types
        assert format_by_name(name).name == name


def test_names_of_mixes() -> None:
    assert find_mix("q4_k").name == find_mix("Q4_K_M").name == "Q4_K_M"
    assert set(ALIASES.values()) <= MIXES.keys()
    with pytest.raises(UnsupportedError, match="did you mean Q4_K_M"):
        find_mix("Q4_KM")


# -- rules --------------------------------------------------------------------------------------


@pytest.fixture
def llama() -> Described:
    return described(MODELS["llama"])


def types(recipe: Recipe) -> dict[str, str]:
    return {t.tensor.name: t.type.name for t in recipe.targets}


def test_the_last_rule_that_fits_counts(llama: Described) -> None:
    rules = [parse_rule(text) for text in ("ffn_down=q8_0", r"blk\.[01]\.ffn=Q6_K", "attn_k=F16")]
    found = types(make_recipe(llama, MIXES["Q4_0"], rules=rules))
    assert found["blk.0.ffn_down.weight"] == found["blk.1.ffn_up.weight"] == "Q6_K"
    assert found["blk.2.ffn_down.weight"] == "Q8_0"
    assert found["blk.2.ffn_up.weight"] == "Q4_0"
    assert found["blk.9.attn_k.weight"] == "F16"


def test_types_of_both_ends(llama: Described) -> None:
    found = types(make_recipe(llama, MIXES["Q4_0"], output_type="F16", embd_type="q8_0"))
    assert (found["output.weight"], found["token_embd.weight"]) == ("F16", "Q8_0")
    tied = described(MODELS["gqa4"])
    assert types(make_recipe(tied, MIXES["Q4_0"], output_type="F16"))["token_embd.weight"] == "F16"


def test_a_pure_format_is_everywhere(llama: Described) -> None:
    assert set(types(make_recipe(llama, MIXES["Q4_K_M"], pure=True)).values()) == {"Q4_K"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rules": [TypeRule("ffn_dwn", "Q8_0")]}, "no matrix name matches 'ffn_dwn=Q8_0'"),
        (
            {"rules": [TypeRule("ffn_down", "Q6_K")]},
            "ffn_down.weight: Q6_K needs .* 256; these have 264 .* F16",
        ),
        (
            {"pure": True},
            "Q8_0 needs rows that are multiples of 32; these have 264 weights; use F16",
        ),
        ({"embd_type": "Q9_9"}, "unknown weight format 'Q9_9'"),
    ],
)
def test_what_was_asked_for_must_fit(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TreadleError, match=message):
        make_recipe(described(MODELS["rows8"]), MIXES["Q8_0"], **settings)


def test_what_stands_in_is_said() -> None:
    recipe = make_recipe(described(MODELS["rows32"]), MIXES["Q4_K_M"])
    notes = {t.tensor.name: (t.type.name, t.note) for t in recipe.targets}
    assert notes["blk.0.attn_q.weight"] == (
        "Q5_0",
        "rows of 288 weights are not a multiple of Q4_K's block of 256",
    )


@pytest.mark.parametrize("text", ["ffn_down", "=Q8_0", "ffn_down=", "(=Q8_0", "a=Q9_9"])
def test_rules_that_are_none(text: str) -> None:
    with pytest.raises(TreadleError):
        parse_rule(text)


# -- files --------------------------------------------------------------------------------------

WEIGHTS = "blk.0.ffn_down.weight"


def write_source(path: Path, x: np.ndarray, name: str = WEIGHTS, fmt: str = "F32") -> GGUF:
    writer = GGUFWriter(path)
    writer.add("general.architecture", "llama")
    writer.add("llama.block_count", 1)
    norm = np.ones(x.shape[-1], np.float32)
    writer.add_tensor("blk.0.ffn_norm.weight", norm.shape, "F32", norm)
    writer.add_tensor(name, x.shape, fmt, by_name(fmt).quantize_rows(x.astype(np.float32)))
    writer.write()
    return open_gguf(path)


def convert(source: GGUF, path: Path, mix: str, **settings: Any) -> GGUF:
    imatrix = settings.get("imatrix")
    recipe = make_recipe(source, find_mix(mix), imatrix=imatrix)
    writing.write(source, recipe, path, n_threads=settings.pop("n_threads", 2), **settings)
    return open_gguf(path)


@pytest.mark.parametrize("fmt", ["Q8_0", "Q4_0", "Q4_1", "F16", "BF16"])
def test_the_same_bytes_as_llama_cpps_files(fmt: str, data: Path, tmp_path: Path) -> None:
    folder = data / "models" / "babyllama105"
    with (
        open_gguf(folder / "babyllama105-F32.gguf") as source,
        open_gguf(folder / f"babyllama105-{fmt}.gguf") as theirs,
        convert(source, tmp_path / "ours.gguf", fmt) as ours,
    ):
        same = [n for n, t in theirs.tensors.items() if t.ggml_type == ours.tensors[n].ggml_type]
        assert len(same) >= 46  # the file was made with another choice for the output
        for name in same:
            assert ours.tensors[name].data.tobytes() == theirs.tensors[name].data.tobytes(), name
        mine = {"general.file_type", "general.quantization_version"}
        assert ours.metadata.keys() - mine == source.metadata.keys() - mine
        for key in source.metadata.keys() - mine:
            assert ours.types[key] == source.types[key]
            assert repr(ours.metadata[key]) == repr(source.metadata[key])
        assert ours.metadata["general.file_type"] == MIXES[fmt].file_type


def test_neither_threads_nor_strips_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(1).standard_normal((37, 96))
    source = write_source(tmp_path / "source.gguf", x)
    files = []
    for n_threads, strip in ((1, 1 << 18), (3, 96), (2, 500)):
        monkeypatch.setattr(output, "TASK_WEIGHTS", strip)
        path = tmp_path / f"{n_threads}.gguf"
        convert(source, path, "Q8_0", n_threads=n_threads).close()
        files.append(path.read_bytes())
    assert files[0] == files[1] == files[2]
    with open_gguf(path) as made:
        error = np.abs(made.tensors[WEIGHTS].dequantize() - x).max()
    assert error <= np.abs(x).max() / 127


def test_shards_become_one_file(data: Path, tmp_path: Path) -> None:
    folder = data / "models" / "stories260K_split"
    with (
        open_gguf(folder / "stories260K-00001-of-00003.gguf") as source,
        convert(source, tmp_path / "one.gguf", "F16") as made,
    ):
        assert not [key for key in made.metadata if key.startswith("split.")]
        assert list(made.tensors) == list(source.tensors)
        norm = "blk.4.ffn_norm.weight"
        assert made.tensors[norm].data.tobytes() == source.tensors[norm].data.tobytes()
        wide = source.tensors[WEIGHTS].dequantize()
        assert np.array_equal(
            made.tensors[WEIGHTS].dequantize(), wide.astype(np.float16).astype(np.float32)
        )


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source.gguf", np.ones((9, 64)))
    seen: list[tuple[str, int, int]] = []
    convert(
        source, tmp_path / "made.gguf", "Q8_0", progress=lambda *told: seen.append(told)
    ).close()
    total = 9 * 64 * 4 + 64 * 4
    assert seen[-1] == ("quantizing", total, total)


TOY = np.dtype([("x", "<f4", (4,))])


def toy_quantize(x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Keeps each weight times its importance, so that a test sees what arrives."""
    out = np.empty(x.shape[:-1], TOY)
    out["x"] = x if weights is None else x * weights
    return out


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Format:
    made = Format("TOY", 99, 4, TOY, lambda blocks: blocks["x"], toy_quantize)
    monkeypatch.setitem(FORMATS, 99, made)
    return made


def test_importances_meet_their_columns_and_experts(
    tmp_path: Path, toy: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "TASK_WEIGHTS", 24)  # strips that end inside an expert's matrix
    name = "blk.0.ffn_down_exps.weight"
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 5, 8)).astype(np.float32)
    sums = rng.uniform(1, 2, (3, 8))
    counts = np.array([4.0, 0.0, 8.0])
    matrix = ImportanceMatrix({name: ImatrixEntry(sums, counts)}, ("text",), 7)
    source = write_source(tmp_path / "source.gguf", x, name)
    with convert(source, tmp_path / "made.gguf", "toy", imatrix=matrix) as made:
        expected = sums / np.maximum(counts, 1)[:, None]
        expected[1] = 1.0  # no token chose this expert
        found = made.tensors[name].dequantize()
        np.testing.assert_allclose(found, x * expected[:, None], rtol=1e-6)
        assert made.metadata["quantize.imatrix.chunks_count"] == 7
        assert "general.file_type" not in made.metadata  # llama.cpp has no number for it


# -- what goes wrong leaves nothing behind ------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "mix", "message"),
    [
        (np.nan, "Q8_0", "rows 4 to 5: holds a weight that is not a finite number"),
        (-np.inf, "Q4_0", "rows 4 to 5: holds a weight that is not a finite number"),
        (7e4, "F16", "rows 4 to 5: holds 70000, too large for F16"),
        (3e7, "Q8_0", "rows 4 to 5: holds 3e.07, too large for Q8_0"),
    ],
)
def test_weights_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float, mix: str, message: str
) -> None:
    monkeypatch.setattr(output, "TASK_WEIGHTS", 64)
    x = np.ones((7, 32))
    x[5, 17] = bad
    source = write_source(tmp_path / "source.gguf", x)
    with pytest.raises(FileError, match=f"source.gguf: {WEIGHTS}: {message}"):
        convert(source, tmp_path / "made.gguf", mix)
    assert [path.name for path in tmp_path.iterdir()] == ["source.gguf"]


def test_targets_that_may_not_be(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source.gguf", np.ones((2, 32)))
    there = tmp_path / "there.gguf"
    there.write_bytes(b"mine")
    (tmp_path / "link.gguf").symlink_to(tmp_path / "source.gguf")
    for name, message in (
        ("there.gguf", "exists already"),
        ("link.gguf", "is also the input"),
        ("no/made.gguf", "its folder does not exist"),
        (".", "folder"),
    ):
        with pytest.raises(FileError, match=message):
            convert(source, tmp_path / name, "Q8_0")
    with pytest.raises(FileError, match="is also the input"):
        convert(source, tmp_path / "source.gguf", "Q8_0", overwrite=True)
    assert there.read_bytes() == b"mine"
    convert(source, there, "Q8_0", overwrite=True).close()
    assert there.read_bytes()[:4] == b"GGUF"


def test_weights_that_were_quantized_before(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source.gguf", np.ones((2, 32)), fmt="Q8_0")
    with pytest.raises(UnsupportedError, match=f"{WEIGHTS} is Q8_0, already quantized"):
        convert(source, tmp_path / "made.gguf", "Q4_0")
    with convert(source, tmp_path / "made.gguf", "Q4_0", allow_requantize=True) as made:
        assert made.tensors[WEIGHTS].type_name == "Q4_0"
    with convert(source, tmp_path / "same.gguf", "Q8_0") as same:  # nothing is lost by a copy
        assert same.tensors[WEIGHTS].data.tobytes() == source.tensors[WEIGHTS].data.tobytes()


SOURCE = "source.gguf"
TARGET = "made.gguf"
HALF = [SOURCE, ".made.gguf.part", ".made.gguf.part.journal"]


def stopped(source: GGUF, path: Path, mix: str, at: int, **settings: Any) -> list[str]:
    """Ctrl-C when ``at`` bytes of the source are done; what was said."""

    def stop(stage: str, done: int, total: int) -> None:
        if done >= at:
            raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        convert(source, path, mix, progress=stop, say=said.append, **settings)
    return said


def test_what_was_stopped_is_continued(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    source = write_source(tmp_path / SOURCE, rng.standard_normal((64, 32)))
    said = stopped(source, tmp_path / TARGET, "Q8_0", 128 + 1)
    assert said == ["partial output kept: run the same command to resume"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(HALF)
    convert(source, tmp_path / TARGET, "Q8_0", say=said.append).close()
    assert said[1:] == ["resuming: 1 of 2 tensors are already written"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [TARGET, SOURCE]
    convert(source, tmp_path / "whole.gguf", "Q8_0").close()
    assert (tmp_path / TARGET).read_bytes() == (tmp_path / "whole.gguf").read_bytes()


@pytest.mark.parametrize("change", ["mix", "importances"])
def test_another_job_does_not_continue_it(
    tmp_path: Path, toy: Format, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Importances of the same file and count are told by their numbers."""
    monkeypatch.setattr(output, "TASK_WEIGHTS", 32)
    source = write_source(tmp_path / SOURCE, np.ones((64, 32)))

    def matrix(of: float) -> ImportanceMatrix:
        return ImportanceMatrix({WEIGHTS: ImatrixEntry(np.full((1, 32), of), np.ones(1))})

    stopped(source, tmp_path / TARGET, "toy", 4096, imatrix=matrix(2.0))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(HALF)
    said: list[str] = []
    mix, of = ("F16", 2.0) if change == "mix" else ("toy", 3.0)
    with convert(source, tmp_path / TARGET, mix, imatrix=matrix(of), say=said.append) as made:
        assert said == ["discarded an unfinished .part file of a different conversion"]
        wanted = 1.0 if change == "mix" else 3.0
        assert np.all(made.tensors[WEIGHTS].dequantize() == wanted)


def test_a_full_disk_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "TASK_WEIGHTS", 64)
    source = write_source(tmp_path / SOURCE, np.ones((64, 32)))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing(os.pwrite, errno.ENOSPC))
        with pytest.raises(FileError, match=r"made\.gguf: the disk is full; partial output kept"):
            convert(source, tmp_path / TARGET, "Q8_0")
    convert(source, tmp_path / TARGET, "Q8_0").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [TARGET, SOURCE]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {WEIGHTS: (1, 16)},
            rf"{WEIGHTS}: has importances of shape \[1, 16\] \(expected \[1, 32\]",
        ),
        ({WEIGHTS: (2, 32)}, r"shape \[2, 32\]"),
        ({"blk.9.attn_q.weight": (1, 32)}, "no importances for any tensor of source.gguf"),
    ],
)
def test_importances_of_another_model(
    tmp_path: Path, entries: dict[str, tuple[int, int]], message: str
) -> None:
    source = write_source(tmp_path / "source.gguf", np.ones((2, 32)))
    matrix = ImportanceMatrix(
        {name: ImatrixEntry(np.ones(shape), np.ones(shape[0])) for name, shape in entries.items()}
    )
    with pytest.raises(FileError, match=message):
        convert(source, tmp_path / "made.gguf", "Q8_0", imatrix=matrix)
