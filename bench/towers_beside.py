"""Media rows of one projector file, treadle's beside llama.cpp's, for every projector type that
both read: small random models, the same pixels or mel frames.

::

    python bench/towers_beside.py --peer PYTHON --sources LLAMA_CPP

PYTHON is the interpreter of an environment with llama-cpp-python; LLAMA_CPP its sources (of the
sdist, ``vendor/llama.cpp``), of whose internal headers ``mtmd_rows.cpp`` is compiled. All matrices
are written in F32, so that only the readings differ: llama.cpp's GELU is a table of f16, and its
convolutions round patches to f16, 5e-4 of the largest value together.

Where llama.cpp reads a file otherwise than transformers, a second comparison applies its reading:
to the file that it is given, or to the order of rows. It has to agree, or the command fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treadle.devices import open_device
from treadle.files.gguf import GGUFWriter, open_gguf
from treadle.formats import by_name
from treadle.media.pixels import normalise
from treadle.media.projector import Projector, open_projector
from treadle.media.projector_source import open_projector_source

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "media"
SOURCE = Path(__file__).with_name("mtmd_rows.cpp")
NEAR = 2e-3  # of the largest value; the least of the known differences is 1e-2
RATE = 16000

Arrays = dict[str, np.ndarray]
Edit = Callable[[Arrays], None]
Rows = Callable[[np.ndarray, tuple[int, int]], np.ndarray]


def same(arrays: Arrays) -> None:
    """Leave the file as it is."""


def class_behind(arrays: Arrays) -> None:
    """llama.cpp puts the class token behind the patches, and adds positions in the table's order,
    in which the class token's is first.
    """
    table = arrays["v.position_embd.weight"]
    arrays["v.position_embd.weight"] = np.roll(table, -1, -2)


def moondream(arrays: Arrays) -> None:
    """A tower without a class token and with a norm behind the layers, as moondream2's."""
    rng = np.random.default_rng(1)
    n = len(arrays.pop("v.class_embd").ravel())
    arrays["v.position_embd.weight"] = arrays["v.position_embd.weight"][1:]
    arrays["v.post_ln.weight"] = 1 + 0.1 * rng.standard_normal(n)
    arrays["v.post_ln.bias"] = 0.1 * rng.standard_normal(n)


def norms_named(arrays: Arrays) -> None:
    """The converter names the norm before the FFN as one behind attention."""
    for name in [name for name in arrays if ".attn_post_norm." in name]:
        arrays[name.replace(".attn_post_norm.", ".ln2.")] = arrays.pop(name)


def with_breaks(arrays: Arrays) -> None:
    """llama.cpp requires the embedding of [IMG_BREAK]."""
    n = arrays["mm.2.weight"].shape[0]
    arrays["v.token_embd.img_break"] = np.full(n, 7.0, np.float32)


def ultravox(arrays: Arrays) -> None:
    """Voxtral's encoder with Ultravox' projector of eight states."""
    rng = np.random.default_rng(1)
    n = arrays["a.position_embd.weight"].shape[1]
    for name in [name for name in arrays if name.startswith("mm.")]:
        del arrays[name]
    arrays |= {
        "mm.a.norm_pre.weight": 0.4 + rng.random(8 * n),
        "mm.a.mlp.1.weight": rng.standard_normal((80, 8 * n)) / (8 * n) ** 0.5,
        "mm.a.norm_mid.weight": 0.4 + rng.random(40),
        "mm.a.mlp.2.weight": rng.standard_normal((n, 40)) / 40**0.5,
    }
    arrays["a.position_embd.weight"] = arrays["a.position_embd.weight"][:144]


def as_given(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """All rows in their order."""
    return rows


def but_the_first(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """Rows of patches without the first: llama.cpp has the class token's in its place, the last."""
    return rows[1 : grid[0] * grid[1]]


def but_the_last(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """llama.cpp's rows without the class token's."""
    return rows[:-1]


def column_by_column(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """llama.cpp's rows of a square, which stand column by column."""
    side = int(len(rows) ** 0.5)
    return rows.reshape(side, side, -1).transpose(1, 0, 2).reshape(rows.shape)


def without_breaks(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """llama.cpp's rows without those of [IMG_BREAK], which are all alike."""
    return rows[~(rows == 7.0).all(1)]


def without_newline(rows: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
    """A tile's rows alone."""
    return rows[: grid[0] * grid[1]]


@dataclass(frozen=True)
class Case:
    """A tiny model, and how llama.cpp reads it.

    sizes: heights and widths of pictures, which need no resizing; or seconds of sounds.
    tile: the pictures are tiles.
    edit: makes the file, for both. why: how llama.cpp reads it otherwise; "" if it does not.
    theirs: changes the file such that llama.cpp reads what is meant.
    ours_kept, theirs_kept: the rows that both have, in one order.
    """

    name: str
    sizes: tuple[Any, ...]
    tile: bool = False
    audio: bool = False
    max_rows: int | None = None
    keys: Mapping[str, Any] | None = None
    edit: Edit = same
    why: str = ""
    theirs: Edit = same
    their_keys: Mapping[str, Any] | None = None
    ours_kept: Rows = as_given
    theirs_kept: Rows = as_given


CLASS = "class token behind the patches, positions as if before them"
LLAVA = Case(
    "llava",
    ((56, 56),),
    tile=True,
    why=f"{CLASS}; the first patch's row is left out",
    theirs=class_behind,
    ours_kept=but_the_first,
    theirs_kept=but_the_last,
)
CASES = (
    Case("qwen2vl", ((56, 112), (112, 84))),
    Case("qwen25vl", ((56, 112), (140, 84), (196, 224))),
    Case("qwen3vl", ((128, 192), (192, 96))),
    Case("qwen35", ((128, 128), (128, 192))),
    Case("glm4v", ((112, 112), (112, 168))),
    Case("gemma3", ((224, 224),), tile=True),
    Case(
        "gemma4",
        ((192, 192), (168, 216)),
        max_rows=70,
        why="quick GELU: the file has no key for it",
        their_keys={"clip.use_gelu": True},
    ),
    Case("gemma4u", ((180, 192), (192, 180)), max_rows=255),
    Case("smolvlm", ((64, 64),), tile=True),
    LLAVA,
    replace(LLAVA, name="llavanext"),
    Case("llava", ((56, 56),), tile=True, keys={"clip.vision.feature_layer": None}, edit=moondream),
    Case("pixtral", ((64, 96), (128, 64)), edit=with_breaks, theirs_kept=without_breaks),
    Case("mistral3", ((64, 96), (128, 64)), edit=with_breaks, theirs_kept=without_breaks),
    Case("internvl", ((56, 56),), tile=True, why=CLASS, theirs=class_behind),
    Case("lfm2vl", ((256, 256), (256, 320))),
    Case(
        "llama4",
        ((56, 56),),
        tile=True,
        why="rows column by column; the converter's norm before the FFN is missed",
        theirs=norms_named,
        theirs_kept=column_by_column,
    ),
    Case("qwen2audio", (3.0,), audio=True),
    Case("qwen3asr", (2.0, 3.0, 10.0), audio=True),
    Case("gemma4u", (0.5,), audio=True),
    Case(
        "voxtral",
        (2.88,),
        audio=True,
        keys={"clip.projector_type": "ultravox", "clip.audio.projector.stack_factor": 8},
        edit=ultravox,
    ),
)
# llama.cpp's Voxtral has half as many rows: it takes means of two states, which the model does not
# (ggml-org/llama.cpp#25496).


def write(path: Path, metadata: Mapping[str, Any], arrays: Arrays) -> None:
    """Write a projector file in F32; keys of None are left out."""
    w = GGUFWriter(path)
    for key, value in metadata.items():
        if value is None or key == "general.file_type":
            continue
        if key.endswith(("image_mean", "image_std")):
            value = np.asarray(list(value), np.float32)
        elif not isinstance(value, (str, int, float)):
            value = list(value)
        w.add(key, value)
    for name, values in arrays.items():
        w.add_tensor(name, values.shape, "F32", np.ascontiguousarray(values, np.float32))
    w.write()


def copies(case: Case, folder: Path) -> tuple[Path, Path, Path]:
    """Write the file, and that in which llama.cpp's reading finds the same; return their paths, the
    latter twice if nothing differs.
    """
    with open_gguf(DATA / case.name / "mmproj.gguf") as gguf:
        arrays = {name: np.array(t.dequantize()) for name, t in gguf.tensors.items()}
        metadata = {**gguf.metadata, **(case.keys or {})}
        case.edit(arrays)
        ours = folder / "ours.gguf"
        write(ours, metadata, arrays)
        theirs = folder / "theirs.gguf"
        case.theirs(arrays)
        write(theirs, {**metadata, **(case.their_keys or {})}, arrays)
    return ours, ours, theirs


# -- llama.cpp --------------------------------------------------------------------------------


def build(python: str, sources: Path, folder: Path) -> Path:
    """Compile ``mtmd_rows.cpp``; return the program."""
    code = "import llama_cpp, os; print(os.path.dirname(llama_cpp.__file__))"
    package = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    lib = Path(package.stdout.strip()) / "lib"
    program = folder / "mtmd_rows"
    includes = ("tools/mtmd", "include", "ggml/include", "ggml/src", "vendor")
    libraries = ("mtmd", "llama", "ggml", "ggml-base", "ggml-cpu")
    subprocess.run(
        [
            os.environ.get("CXX", "g++"),
            *("-std=c++17", "-O1", "-o", program, SOURCE),
            *(f"-I{sources / name}" for name in includes),
            *(lib / f"lib{name}.so" for name in libraries),
            f"-Wl,-rpath,{lib}",
        ],
        check=True,
    )
    return program


class Peer:
    """llama.cpp's tower of one file."""

    def __init__(self, program: Path, path: Path, kind: str) -> None:
        self.path = path
        self.process = subprocess.Popen(
            [program, path, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ready = self._line() == "ready"

    def rows(self, values: np.ndarray, nx: int, ny: int) -> np.ndarray:
        """Return the media rows of pixels ``[ny, nx, 3]`` or mel frames ``[ny, nx]``; none if it
        ends.
        """
        given = self.path.with_suffix(".in")
        made = self.path.with_suffix(".out")
        np.ascontiguousarray(values, np.float32).tofile(given)
        assert self.process.stdin is not None
        print(nx, ny, given, made, file=self.process.stdin, flush=True)
        found = self._line().split()
        if len(found) != 2 or not found[0].isdigit():
            return np.zeros((0, 1), np.float32)
        return np.fromfile(made, np.float32).reshape(int(found[0]), -1)

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


# -- the comparison ---------------------------------------------------------------------------


def ours(
    projector: Projector, case: Case, size: Any
) -> tuple[np.ndarray, tuple[int, int], list[tuple[np.ndarray, int, int]]]:
    """Return treadle's rows of a random picture or sound, its grid, and what llama.cpp is given."""
    rng = np.random.default_rng(0)
    if case.audio:
        samples = 0.1 * rng.standard_normal(int(RATE * size)).astype(np.float32)
        prepared = projector.prepare(samples, case.max_rows, "audio")
        frames = [each.patches for each in prepared.inputs]
        given = [(rows.T, len(rows), rows.shape[1]) for rows in frames]
        return projector.encode(prepared), (1, 1), given
    pixels = rng.integers(0, 256, (*size, 3)).astype(np.uint8)
    family: Any = projector.family("image")
    if case.tile and hasattr(family, "image"):
        prepared = family.image(pixels, [pixels], layout=(range(1),), resized=size)
    else:
        prepared = family.prepare(pixels, case.max_rows)
    if prepared.resized != size:
        raise SystemExit(f"{case.name}: a picture of {size} was resized to {prepared.resized}")
    values = normalise(pixels, family.clip.mean, family.clip.std)
    grid: tuple[int, int] = prepared.inputs[0].grid
    return projector.encode(prepared), grid, [(values, size[1], size[0])]


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference by the largest value; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def compare(case: Case, program: Path, folder: Path) -> Iterator[tuple[list[str], bool]]:
    """Yield the cells of each size, and whether the readings agree where they should."""
    kind = "audio" if case.audio else "image"
    path, *given = copies(case, folder)
    device = open_device("cpu", None, 1, None)
    with closing(open_projector(open_gguf(path), device, exact=True)) as projector:
        peers = [Peer(program, each, kind) for each in given]
        family = projector.family(kind)
        for size in case.sizes:
            rows, grid, inputs = ours(projector, case, size)
            found = [np.concatenate([peer.rows(*each) for each in inputs]) for peer in peers]
            plain = difference(without_newline(rows, grid) if case.tile else rows, found[0])
            if case.theirs_kept is without_breaks:
                plain = difference(rows, without_breaks(found[0], grid))
            read = difference(case.ours_kept(rows, grid), case.theirs_kept(found[1], grid))
            what = f"{size:g} s" if case.audio else f"{size[1]} x {size[0]}"
            shown = f"{read:.1e}" if case.why else ""
            cells = [f"`{family.clip.projector_type}`", case.name, what, str(len(rows))]
            yield [*cells, f"{plain:.1e}", case.why, shown], read < NEAR
        for peer in peers:
            peer.close()


def converted(program: Path, folder: Path, roots: Sequence[Path]) -> Iterator[tuple[str, bool]]:
    """Yield the folders below ``roots`` whose projector files ``treadle convert`` makes, and
    whether llama.cpp opens them.
    """
    from treadle.convert.recipe import Options
    from treadle.convert.writer import convert

    named = {"image": "vision", "audio": "audio"}
    for path in sorted(each for root in roots for each in root.iterdir()):
        if not (path / "model.safetensors").exists() or not (DATA / path.name).exists():
            continue
        if not (DATA / path.name / "mmproj.gguf").exists():
            continue  # Whisper has none
        made = folder / f"{path.name}.gguf"
        with closing(open_projector_source(path, by_name("F16"))) as source:
            convert(source, made, Options(force=True))
        with open_gguf(made) as gguf:
            kinds = [k for k, v in named.items() if gguf.metadata.get(f"clip.has_{v}_encoder")]
        for kind in kinds:
            with closing(Peer(program, made, kind)) as peer:
                yield f"{path.name} {kind}", peer.ready


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", required=True, help="an interpreter that has llama-cpp-python")
    parser.add_argument("--sources", required=True, type=Path, help="llama.cpp's sources")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument(
        "--folders",
        action="append",
        type=Path,
        default=[],
        help="a folder of further Hugging Face folders, which are converted and opened",
    )
    given = parser.parse_args()
    columns = ["type", "model", "input", "rows", "differ by", "llama.cpp's reading", "so read"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    bad = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = build(given.peer, given.sources, folder)
        for case in CASES:
            if given.only and case.name not in given.only:
                continue
            for cells, agree in compare(case, program, folder):
                print(f"| {' | '.join(cells)} |", flush=True)
                if not agree:
                    bad.append(case.name)
        if not given.only:
            for what, opens in converted(program, folder, (DATA, *given.folders)):
                print(f"converted {what}: {'opened' if opens else 'REFUSED'}", flush=True)
                if not opens:
                    bad.append(what)
    if bad:
        sys.exit(f"differ: {', '.join(bad)}")


if __name__ == "__main__":
    main()
