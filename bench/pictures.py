"""Towers of published sizes with random weights: seconds of a picture, beside a text prompt of as
many rows, and beside llama.cpp's.

::

    python bench/pictures.py                                # a table of all sizes
    python bench/pictures.py --only siglip-384 --steps      # where the time goes
    python bench/pictures.py --rival PYTHON                 # llama.cpp on the same files, in turns

PYTHON is the interpreter of an environment with llama-cpp-python. A multiplication and an addition
are two operations; norms and activations count as none. The peak is that of dots in registers,
measured in the same minutes: of i16 where towers use them, else of f32. The text is a prompt of as
many tokens as the tower has patches (2048 at most), in a decoder with the tower's width and
matrices of the same format: what its products reach here, a tower's can too. Products with Q8_0 are
of bytes on some machines, whose peak is higher.

Files are written to a temporary folder, which takes 1.5 GB for the largest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from random_model import Shape, random_rows
from random_model import write as write_model
from rival import Rival

from treadle.files.gguf import GGUFWriter
from treadle.formats import by_name

if TYPE_CHECKING:
    from treadle.formats import Format
    from treadle.media.projector import MediaTower, Projector

N_OUT = 2048  # width of the media rows
TEXT_LAYERS = 2  # of the decoder beside: its speed is the same with more
MOST_TEXT = 2048  # tokens of its prompt
SHOWN = 8  # slowest kinds of steps
MEBI = 1 << 20


@dataclass(frozen=True)
class TowerShape:
    """A published tower. ``picture``: pixels of a side; ``grid``: of the table of positions."""

    projector_type: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    patch: int
    picture: int
    grid: int
    merge: int = 1
    class_row: bool = False
    fused: bool = False

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of its file, without ``clip.vision.``."""
        image_size = self.grid * self.patch
        return {
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "block_count": self.n_layer,
            "attention.head_count": self.n_head,
            "attention.layer_norm_epsilon": 1e-6,
            "projection_dim": N_OUT,
            "image_size": image_size,
            "patch_size": self.patch,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        }


def qwen3(picture: int) -> TowerShape:
    """The tower of Qwen3-VL 8B, without deepstack."""
    return TowerShape("qwen3vl_merger", 27, 1152, 4304, 16, 16, picture, 48, merge=2, fused=True)


SHAPES = {
    "clip-l-336": TowerShape("mlp", 23, 1024, 4096, 16, 14, 336, 24, class_row=True),
    "siglip-384": TowerShape("gemma3", 27, 1152, 4304, 16, 14, 378, 27, merge=3),
    "siglip-896": TowerShape("gemma3", 27, 1152, 4304, 16, 14, 896, 64, merge=4),
    "qwen3-vl-576": qwen3(768),
    "qwen3-vl-1024": qwen3(1024),
}


def write_tower(shape: TowerShape, fmt: Format, path: Path, *, class_behind: bool = False) -> None:
    """Write a projector file: matrices in ``fmt``, or F16 where its blocks do not divide the rows.
    Patch embeddings are F32, as ``treadle convert`` writes them.

    class_behind: the class token's position stands behind the patches', where llama.cpp reads it
        (ggml-org/llama.cpp#25814).
    """
    w = GGUFWriter(path)
    w.add("general.architecture", "clip")
    w.add("clip.has_vision_encoder", True)
    w.add("clip.projector_type", shape.projector_type)
    w.add("clip.use_gelu", not shape.class_row)
    for key, value in shape.keys.items():
        w.add(f"clip.vision.{key}", value)
    if shape.projector_type == "gemma3":
        w.add("clip.vision.projector.scale_factor", shape.merge)
    if shape.projector_type == "qwen3vl_merger":
        w.add("clip.vision.spatial_merge_size", shape.merge)
    rng = np.random.default_rng(0)
    seeds = iter(range(1 << 20))

    def matrix(name: str, m: int, k: int) -> None:
        own = by_name("F16") if k % fmt.block else fmt
        seed = next(seeds)
        w.add_tensor(f"{name}.weight", (m, k), own, lambda: random_rows(own, m, k, seed))

    def vector(name: str, n: int, base: float = 0.0) -> None:
        w.add_tensor(name, (n,), "F32", (base + 0.05 * rng.standard_normal(n)).astype(np.float32))

    def linear(name: str, m: int, k: int) -> None:
        matrix(name, m, k)
        vector(f"{name}.bias", m)

    def norm(name: str, n: int, *, bias: bool = True) -> None:
        vector(f"{name}.weight", n, 1.0)
        if bias:
            vector(f"{name}.bias", n)

    def table(name: str, *dims: int) -> None:
        w.add_tensor(name, dims, "F32", 0.05 * rng.standard_normal(dims, np.float32))

    d = shape.n_embd
    frames = ("weight", "weight.1") if shape.fused else ("weight",)
    for end in frames:
        table(f"v.patch_embd.{end}", d, 3, shape.patch, shape.patch)
    if not shape.class_row:
        vector("v.patch_embd.bias", d)
    dims = shape.grid**2 + shape.class_row, d
    positions = 0.05 * rng.standard_normal(dims, np.float32)
    if class_behind:
        positions = np.roll(positions, -1, axis=0)
    w.add_tensor("v.position_embd.weight", dims, "F32", positions)
    if shape.class_row:
        vector("v.class_embd", d)
        norm("v.pre_ln", d)
    for i in range(shape.n_layer):
        blk = f"v.blk.{i}"
        norm(f"{blk}.ln1", d)
        norm(f"{blk}.ln2", d)
        if shape.fused:
            linear(f"{blk}.attn_qkv", 3 * d, d)
        else:
            for kind in "qkv":
                linear(f"{blk}.attn_{kind}", d, d)
        linear(f"{blk}.attn_out", d, d)
        linear(f"{blk}.ffn_up", shape.n_ff, d)
        linear(f"{blk}.ffn_down", d, shape.n_ff)
    if shape.projector_type == "mlp":
        w.add("clip.vision.feature_layer", [shape.n_layer])
        linear("mm.0", N_OUT, d)
        linear("mm.2", N_OUT, N_OUT)
    else:
        norm("v.post_ln", d)
    if shape.projector_type == "gemma3":
        norm("mm.soft_emb_norm", d, bias=False)
        rows = random_rows(by_name("F16"), d, N_OUT, next(seeds))
        w.add_tensor("mm.input_projection.weight", (d, N_OUT), "F16", rows)
    if shape.projector_type == "qwen3vl_merger":
        joined = shape.merge**2 * d
        linear("mm.0", joined, joined)
        linear("mm.2", N_OUT, joined)
    w.write()


# -- treadle ----------------------------------------------------------------------------------


class Picture:
    """A random picture, prepared for a projector."""

    def __init__(self, projector: Projector, shape: TowerShape) -> None:
        rng = np.random.default_rng(1)
        side = shape.picture
        self.projector = projector
        self.pixels = rng.integers(0, 256, (side, side, 3)).astype(np.uint8)
        rows = None if shape.projector_type != "qwen3vl_merger" else (side // shape.patch // 2) ** 2
        self.prepared = projector.prepare(self.pixels, rows)
        (self.tower_input,) = self.prepared.inputs
        if self.tower_input.grid != (side // shape.patch,) * 2:
            raise SystemExit(f"a picture of {side} pixels became {self.tower_input.grid} patches")

    @property
    def n_patches(self) -> int:
        """Rows of the tower, the class token among them."""
        return len(self.tower_input.patches)

    def encode(self) -> tuple[float, np.ndarray]:
        """Seconds of the tower and its projector, and the media rows."""
        began = time.perf_counter()
        rows = self.projector.encode(self.prepared)
        return time.perf_counter() - began, rows

    def operations(self) -> int:
        """Operations of all products and of attention."""
        tower = self.projector.towers["image"]
        engines = [(tower.engine, self.n_patches)]
        engines += [(engine, self.prepared.n_rows) for engine in tower.projectors]
        total = 0
        for engine, n_rows in engines:
            total += sum(n for _, n in operations_of(tower, engine, n_rows))
        return total


def operations_of(tower: MediaTower, engine: Any, n_rows: int) -> Iterator[tuple[str, int]]:
    """Yield the kinds of a plan's steps that multiply, and each one's operations for ``n_rows``,
    all layers together.
    """
    config = engine.config
    stages = (*config.stem, *config.tail)
    names = {f"{stem}.weight" for stage in stages for stem in stage.weights}
    for name, tensor in engine.gguf.tensors.items():
        if len(tensor.shape) == 2 and (name in names or name.startswith("blk.")):
            if name.startswith("blk.") and not config.layers:
                continue
            m, k = tensor.shape
            yield kind_of(name.removesuffix(".weight")), 2 * n_rows * m * k
    for layer in config.layers:
        yield "attn", 4 * n_rows * n_rows * layer.n_head * layer.head_dim


def kind_of(label: str) -> str:
    """A step's or a tensor's name without its layer's number."""
    first, _, rest = label.removeprefix("blk.").partition(".")
    layer = first.removeprefix("L")
    return rest if rest and layer.isdigit() else label


def step_seconds(picture: Picture) -> dict[str, list[float]]:
    """Seconds of the tower's steps, each run by itself, by kind."""
    engine = picture.projector.towers["image"].engine
    picture.encode()
    ready = engine.plan_for(picture.n_patches)
    found: dict[str, list[float]] = {}
    for i, step in enumerate(ready.plan.steps):
        began = time.perf_counter()
        engine.device.run(ready.program, range(i, i + 1))
        found.setdefault(kind_of(step.label), []).append(time.perf_counter() - began)
    return found


def print_steps(picture: Picture) -> None:
    """Print the slowest kinds of steps, and the longest step: a slice of the work is not shorter.
    Their inputs are the last run's, which the time does not depend on.
    """
    tower = picture.projector.towers["image"]
    work: dict[str, int] = {}
    for kind, n in operations_of(tower, tower.engine, picture.n_patches):
        work[kind] = work.get(kind, 0) + n
    seconds = step_seconds(picture)
    total = sum(map(sum, seconds.values()))
    print(f"\n{len(seconds)} kinds of steps, {total:.2f} s in all:", file=sys.stderr)
    by_time = sorted(seconds.items(), key=lambda item: -sum(item[1]))
    for kind, each in by_time[:SHOWN]:
        n = sum(n for name, n in work.items() if name == kind or alias(name) == kind)
        rate = f"{n / sum(each) / 1e9:7.0f} GFLOP/s" if n else ""
        share = sum(each) / total
        line = f"  {kind:16} {len(each):3} x {1e3 * statistics.median(each):7.1f} ms {share:4.0%}"
        print(f"{line} {rate}", file=sys.stderr)
    longest = max((max(each), kind) for kind, each in seconds.items())
    print(f"  the longest: {longest[1]}, {1e3 * longest[0]:.0f} ms", file=sys.stderr)
    slices = slice_seconds(picture)
    line = f"  {len(slices)} slices, between which others run: the longest"
    times = f"{1e3 * max(slices):.0f} ms, the median {1e3 * statistics.median(slices):.0f} ms"
    print(f"{line} {times}", file=sys.stderr)


def slice_seconds(picture: Picture) -> list[float]:
    """Seconds of each slice of an encoding."""
    found = []
    began = time.perf_counter()
    for _ in picture.projector.encode_runs([picture.prepared]):
        found.append(time.perf_counter() - began)
        began = time.perf_counter()
    return [*found, time.perf_counter() - began]


ALIASES = {"attn_output": "attn.output", "ffn_up": "ffn.up", "ffn_down": "ffn.down"}


def alias(name: str) -> str:
    """The kind of steps that multiplies with a tensor."""
    return ALIASES.get(name, "attn.qkv" if name.startswith("attn_") else name)


def text_rate(shape: TowerShape, fmt: Format, n_tokens: int, threads: int, folder: Path) -> float:
    """Operations a second of a text prompt in a decoder of the tower's width."""
    import treadle
    from treadle.engine.batch import BatchItem

    n_head = shape.n_embd // 64
    own = by_name("F16") if shape.n_embd % fmt.block else fmt
    n_ff = shape.n_ff // 256 * 256
    text = Shape(
        "llama", TEXT_LAYERS, shape.n_embd, n_ff, n_head, n_head, 64, 1024, MOST_TEXT, False
    )
    path = folder / "text.gguf"
    write_model(text, own, str(path))
    ids = np.random.default_rng(2).integers(300, 1000, n_tokens).tolist()
    with treadle.load(path, threads=threads, context=MOST_TEXT) as model:
        engine = model.engine
        best = float("inf")
        for _ in range(3):
            engine.cache.forget()
            with closing(engine.cache.sequence()) as sequence:
                began = time.perf_counter()
                for at in range(0, n_tokens, engine.max_tokens):
                    engine.run([BatchItem(sequence, ids[at : at + engine.max_tokens], 1)])
                best = min(best, time.perf_counter() - began)
    path.unlink()
    d = shape.n_embd
    matrices = TEXT_LAYERS * (4 * d * d + 3 * d * n_ff)
    attention = TEXT_LAYERS * 2 * n_tokens * n_tokens * d  # half of the pairs: it is causal
    return (2 * n_tokens * matrices + attention) / best


def text_attention(shape: TowerShape, n_tokens: int, threads: int, folder: Path) -> float:
    """Operations a second of the attention of a text prompt: as many tokens as the tower has rows,
    heads as its. A token's keys are those before it.
    """
    import treadle
    from treadle.engine.batch import BatchItem

    d, n_head = shape.n_embd, shape.n_head
    text = Shape("llama", 1, d, 256, n_head, n_head, d // n_head, 512, n_tokens, True)
    path = folder / "attention.gguf"
    write_model(text, by_name("F16"), str(path))
    best = float("inf")
    with treadle.load(path, threads=threads, context=n_tokens) as model:
        engine = model.engine
        for _ in range(3):
            engine.cache.forget()
            seconds = 0.0
            with closing(engine.cache.sequence()) as sequence:
                for at in range(0, n_tokens, engine.max_tokens):
                    n = min(engine.max_tokens, n_tokens - at)
                    parts = [BatchItem(sequence, [5] * n, 0)]
                    ready = engine._plan_of(parts)
                    engine._prepare(ready, parts)
                    (step,) = [i for i, s in enumerate(ready.plan) if s.label == "L0.attn"]
                    began = time.perf_counter()
                    engine.device.run(ready.program, range(step, step + 1))
                    seconds += time.perf_counter() - began
                    engine.cache.commit(sequence)
            best = min(best, seconds)
    path.unlink()
    return 2 * n_tokens * (n_tokens + 1) * d / best


# -- llama.cpp --------------------------------------------------------------------------------

# Run by the rival's interpreter: the projector's file, a model of text with rows as wide, pixels.
LLAMA_CPP = """
import ctypes, json, sys, time
import llama_cpp
from llama_cpp import mtmd_cpp as mtmd
import numpy as np
path, text, pixels, side, threads, rows = sys.argv[1:7]
side, threads = int(side), int(threads)
quiet = llama_cpp.llama_log_callback(lambda *args: None)
llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
mtmd.mtmd_log_set(quiet, None)
mtmd.mtmd_helper_log_set(quiet, None)
model = llama_cpp.Llama(text, n_ctx=256, n_threads=threads, verbose=False)
params = mtmd.mtmd_context_params_default()
params.use_gpu = False
params.print_timings = False
params.n_threads = threads
params.warmup = False
if int(rows):
    params.image_min_tokens = params.image_max_tokens = int(rows)
context = mtmd.mtmd_init_from_file(path.encode(), model.model, params)
assert context, "llama.cpp refused " + path
data = np.fromfile(pixels, np.uint8)
picture = mtmd.mtmd_bitmap_init(side, side, data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
given = mtmd.mtmd_default_marker()
prompt = mtmd.mtmd_input_text(given, len(given), False, True)
chunks = mtmd.mtmd_input_chunks_init()
bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(picture)
assert mtmd.mtmd_tokenize(context, chunks, ctypes.byref(prompt), bitmaps, 1) == 0
n = mtmd.mtmd_input_chunks_size(chunks)
found = [mtmd.mtmd_input_chunks_get(chunks, i) for i in range(n)]
images = [c for c in found if mtmd.mtmd_input_chunk_get_type(c) == 1]
print(json.dumps([mtmd.mtmd_input_chunk_get_n_tokens(c) for c in images]), flush=True)
for line in sys.stdin:
    to, width = json.loads(line)
    seconds, made = 0.0, []
    for chunk in images:
        began = time.perf_counter()
        assert mtmd.mtmd_encode_chunk(context, chunk) == 0
        seconds += time.perf_counter() - began
        count = mtmd.mtmd_input_chunk_get_n_tokens(chunk) * width
        made.append(np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(context), (count,)).copy())
    np.concatenate(made).tofile(to)
    print(json.dumps(seconds), flush=True)
"""


class LlamaCpp:
    """llama.cpp's mtmd, by the interpreter that has llama-cpp-python.

    Of a tower with a class token it has a file in which that token's position is where it reads it;
    in place of the first patch's row it has the class token's as the last.
    """

    def __init__(
        self,
        python: str,
        path: Path,
        shape: TowerShape,
        fmt: Format,
        picture: Picture,
        threads: int,
    ) -> None:
        folder = path.parent
        self.class_row = shape.class_row
        if shape.class_row:
            path = path.with_stem(f"{path.stem}_theirs")
            write_tower(shape, fmt, path, class_behind=True)
        text = folder / "rows.gguf"
        small = Shape("llama", 1, N_OUT, 256, 32, 32, 64, 1024, 1024, True)
        write_model(small, by_name("F16"), str(text))
        pixels = folder / "pixels.bin"
        picture.pixels.tofile(pixels)
        self.rows = folder / "rows.bin"
        side = len(picture.pixels)
        n_rows = picture.prepared.n_rows if "qwen" in path.name else 0
        self.program = Rival(python, LLAMA_CPP, path, text, pixels, side, threads, n_rows)
        if sum(self.program.ready) != picture.prepared.n_rows:
            what = f"{self.program.ready} rows, treadle {picture.prepared.n_rows}"
            raise SystemExit(f"llama.cpp makes {what}")

    def encode(self) -> tuple[float, np.ndarray]:
        """As ``Picture.encode``."""
        seconds: float = self.program.ask(str(self.rows), N_OUT)
        return seconds, np.fromfile(self.rows, np.float32).reshape(-1, N_OUT)

    def off(self, ours: np.ndarray, theirs: np.ndarray) -> float:
        """Return the largest difference of the rows that both have, by the largest value."""
        if self.class_row:
            ours = ours[1:]
            theirs = theirs[:-1]
        return float(np.abs(ours - theirs).max() / np.abs(theirs).max())

    def close(self) -> None:
        """End the process."""
        self.program.process.kill()


# -- the table --------------------------------------------------------------------------------


def measure(name: str, fmt: Format, given: argparse.Namespace, folder: Path) -> None:
    """Print a tower's line."""
    from treadle.devices import open_device
    from treadle.media.projector import open_projector
    from treadle.profiling.peaks import measure_peaks
    from treadle.profiling.report import row_in_use

    shape = SHAPES[name]
    if given.layers:
        shape = replace(shape, n_layer=given.layers)
    path = folder / f"{name.replace('-', '_')}.gguf"
    write_tower(shape, fmt, path)
    device = open_device("cpu", None, given.threads, None)
    with closing(open_projector(path, device, exact=given.exact)) as projector:
        picture = Picture(projector, shape)
        work = picture.operations()
        first, rows = picture.encode()
        if not np.isfinite(rows).all():
            raise SystemExit(f"{name}: rows that are not finite")
        print(f"{name}: the first in {first:.1f} s, with kernels compiled", file=sys.stderr)
        rival = None
        if given.rival:
            rival = LlamaCpp(given.rival, path, shape, fmt, picture, given.threads)
        ours = []
        theirs = []
        off = ""
        peak = 0.0
        for turn in range(given.rounds):
            pair = [picture.encode()[0], 0.0]
            if rival is not None:
                pair[1], there = rival.encode()
                theirs.append(pair[1])
                off = f"{rival.off(rows, there):.1e}"
            ours.append(pair[0])
            peaks = measure_peaks(row_in_use(), given.threads)
            peak = max(peak, peaks.f32 if given.exact else peaks.q16 or peaks.f32)
            print(f"{name} {turn}: {pair}", file=sys.stderr)
        n_patches = picture.n_patches
        if given.steps:
            print_steps(picture)
            attention = text_attention(shape, n_patches, given.threads, folder)
            line = f"  attention of a text of {n_patches} tokens"
            print(f"{line}: {attention / 1e9:.0f} GFLOP/s", file=sys.stderr)
        n_rows = picture.prepared.n_rows
    if rival is not None:
        rival.close()
    text = text_rate(shape, fmt, min(n_patches, MOST_TEXT), given.threads, folder)
    path.unlink()
    seconds = statistics.median(ours)
    rate = work / seconds
    cells = [name, n_patches, n_rows, f"{work / 1e12:.2f}", f"**{seconds:.2f}**"]
    cells += [f"{rate / 1e9:.0f} ({rate / peak:.0%})", f"{text / 1e9:.0f} ({text / peak:.0%})"]
    if theirs:
        ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        cells += [f"{statistics.median(theirs):.2f}", f"{ratio:.2f}", off]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", action="append", choices=SHAPES, metavar="NAME")
    parser.add_argument("--format", default="F16", help="of matrices, such as Q8_0")
    parser.add_argument("--exact", action="store_true", help="all products in f32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=0, help="of each tower, for a quick look")
    parser.add_argument("--steps", action="store_true", help="print the slowest steps")
    parser.add_argument("--rival", help="an interpreter that has llama-cpp-python")
    given = parser.parse_args()
    fmt = by_name(given.format)
    print(f"{given.threads} threads, {fmt.name}, medians of {given.rounds} rounds\n")
    columns = ["tower", "patches", "rows", "TFLOP", "seconds", "GFLOP/s (of peak)"]
    columns += ["text: GFLOP/s (of peak)"]
    if given.rival:
        columns += ["llama.cpp: seconds", "times treadle's", "rows differ by"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in given.only or SHAPES:
            measure(name, fmt, given, Path(folder))


if __name__ == "__main__":
    main()
