"""Projector files in ``plan``, ``bench`` and ``inspect``: their steps, their speed, their facts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.cli.profile import RUNS, Profile, facts_of, summary_of
from treadle.cli.speed import PassCost, Peaks
from treadle.cli.ui.progress import ProgressBar
from treadle.errors import TreadleError, UnsupportedError

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.files.gguf import GGUF
    from treadle.media.prepared import PreparedMedia
    from treadle.media.projector import Projector
    from treadle.media.tower_engine import TowerEngine

CLIP = "clip"  # general.architecture of projector files
SOUND_S = 10  # seconds of the sound whose steps ``plan`` shows
RATE = 16000  # samples of a sound a second


@dataclass(frozen=True)
class ImageSize:
    """Width and height of a picture in pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    def pixels(self) -> np.ndarray:
        """Return random pixels, uint8 ``[height, width, 3]``, always the same."""
        return np.random.default_rng(0).integers(0, 256, (self.height, self.width, 3), np.uint8)


class ImageSizeType(click.ParamType[ImageSize]):
    """Parameter type of a picture's size: ``640x480``."""

    name = "size"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> ImageSize:
        """Return the size; fails for one beyond the limits of pictures (``MediaLimits``)."""
        if isinstance(value, ImageSize):
            return value
        words = str(value).lower().replace("×", "x").split("x")
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            self.fail(f"'{value}' is not a width and a height, such as 640x480", param, ctx)
        from treadle.media.limits import MediaLimits

        width, height = map(int, words)
        try:
            MediaLimits().check_size(height, width, "the picture")
        except TreadleError as error:
            self.fail(str(error), param, ctx)
        return ImageSize(width, height)


@dataclass(frozen=True, eq=False)
class TowerSteps:
    """The steps of one plan of a projector file. ``parts``: (0, rows) of each picture or tile in
    the run, as ``Step.cost`` takes them; ``prefix``: text before each label, "" unless the file is
    for pictures and sounds.
    """

    engine: TowerEngine
    parts: list[tuple[int, int]]
    prefix: str

    @property
    def n_rows(self) -> int:
        """Rows of one run, all parts together."""
        return sum(n for _, n in self.parts)

    @property
    def steps(self) -> Sequence[Any]:
        """The plan's steps."""
        return list(self.engine.plan_for(self.n_rows).plan.steps)

    def row_of(self, step: Any, profile: Profile | None, peaks: Peaks) -> dict[str, Any]:
        """Return a step's label, kernel, shape, bytes and operations, and its speed if it was timed
        (``profile``), as JSON has them.
        """
        row = {"label": self.prefix + step.label, "kernel": step.kernel, "shape": list(step.shape)}
        return row | facts_of([step], self.parts, profile, peaks)

    def profile(self, progress: ProgressBar) -> Profile:
        """Time the steps, and the whole run, alternately. The input is what the last encoding left
        in memory.
        """
        device = self.engine.device
        program = self.engine.plan_for(self.n_rows).program
        labels = [step.label for step in self.steps]
        stamped: list[dict[str, float]] = []
        wholes: list[float] = []
        for i in range(RUNS + 1):
            progress("timing the steps", i, RUNS + 1)
            times: list[float] = []
            device.run(program, times=times)
            stamped.append(dict(zip(labels, times, strict=True)))
            began = time.perf_counter()
            device.run(program)
            wholes.append(time.perf_counter() - began)
        progress("timing the steps", RUNS + 1, RUNS + 1)
        return summary_of(stamped[1:], wholes[1:])


def is_projector(path: Path) -> bool:
    """Return whether the file is a projector (mmproj), not a model."""
    from treadle.convert.open import open_model

    if path.is_dir() or path.suffix.lower() != ".gguf":
        return False
    try:
        with open_model(path) as gguf:
            return gguf.metadata.get("general.architecture") == CLIP
    except TreadleError:  # loading the file reports it
        return False


def open_on_device(path: Path, device: Device) -> Projector:
    """Open a projector file on a device, which is closed if that fails."""
    from treadle.media.projector import open_projector

    try:
        return open_projector(path, device)
    except BaseException:
        device.close()
        raise


def prepare(projector: Projector, size: ImageSize, max_rows: int | None) -> list[PreparedMedia]:
    """Return a prepared input for each modality of the projector: a random picture of ``size``, at
    most ``max_rows`` rows, and a silent sound of SOUND_S seconds.
    """
    data = {"image": size.pixels(), "audio": np.zeros(SOUND_S * RATE, np.float32)}
    return [
        projector.prepare(data[kind], max_rows if kind == "image" else None, kind)
        for kind in projector.modalities
    ]


def steps_of(projector: Projector, prepared: PreparedMedia) -> list[TowerSteps]:
    """Return the steps of each different plan that an encoding runs: the tower's, and the
    projector's.
    """
    several = len(projector.modalities) > 1
    prefix = f"{prepared.kind}." if several else ""
    found: dict[int, TowerSteps] = {}
    for engine, rows in projector.towers[prepared.kind].engine_runs(prepared):
        found.setdefault(id(engine), TowerSteps(engine, [(0, n) for n in rows], prefix))
    return list(found.values())


def cost_of(projector: Projector, prepared: PreparedMedia, peaks: Peaks) -> list[PassCost]:
    """Return the cost of each run of the encoding of ``prepared``, in the order of the runs."""
    made = []
    for engine, rows in projector.towers[prepared.kind].engine_runs(prepared):
        steps = engine.plan_for(sum(rows)).plan.steps
        made.append(PassCost.of(steps, [([(0, n) for n in rows], 0)], peaks))
    return made


def describe_projector(gguf: GGUF, problems: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the facts of each modality of a projector file. A projector type that treadle does not
    support is appended to ``problems`` instead. Raises FileError for a damaged file.
    """
    from treadle.media.clip_config import read_clip
    from treadle.media.families import family_of
    from treadle.media.projector import KINDS

    for modality, clip in read_clip(gguf).items():
        try:
            family = family_of(clip.projector_type, str(gguf.path))(clip)
        except UnsupportedError as error:
            problems.append(f"projector: {error}")
            continue
        yield {
            "kind": KINDS[modality],
            "projector_type": clip.projector_type,
            "n_embd": clip.n_embd,
            "n_layer": clip.n_layer,
            "n_head": clip.n_head,
            "n_bounded": clip.n_bounded,
            "image_size": clip.image_size,
            "patch_size": clip.patch_size,
            "n_out": clip.n_out,
            "n_deepstack": family.n_deepstack,
            "decoders": sorted(family.decoders),
        }


def projector_text(facts: dict[str, Any]) -> str:
    """Format the facts of one modality on a line."""
    from treadle.media.kinds import plural

    parts = [f"{plural(facts['kind'])}: {facts['projector_type']}"]
    if facts["n_layer"]:
        parts.append(f"{facts['n_layer']} layers of {facts['n_embd']} values")
    if facts["n_bounded"]:
        parts.append(f"{facts['n_bounded']} matrices with bounds of their values")
    if facts["patch_size"]:
        parts.append(f"patches of {facts['patch_size']} pixels")
    if facts["n_out"]:
        parts.append(f"rows of {facts['n_out']} values")
    if facts["decoders"]:
        parts.append(f"for models of type {', '.join(facts['decoders'])}")
    return ", ".join(parts)
