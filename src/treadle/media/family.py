"""The base of projector families: preparation of media, the tower's inputs, and the steps that the
host computes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from treadle.base.fast_classes import dataclass
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.towers.stages import POSITIONS

if TYPE_CHECKING:
    from treadle.media.clip_config import ClipConfig
    from treadle.models.towers.config import TowerConfig

PATCHES = "patch_embd"  # name of the matrix that multiplies the patches
POSITION_TABLE = "position_embd.weight"


@dataclass(frozen=True, eq=False)
class GridInputs:
    """Inputs of a tower for one grid of patches, besides the patches.

    rows: further input rows by name, f32 ``[n_patches, width]``, such as learned positions.
    ropes: for each rope table the cosines and sines, f32 ``[n_patches, 2, dims / 2]``.
    windows: the first patch of each window, in ascending order; () without windows.
    """

    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    ropes: tuple[np.ndarray, ...] = ()
    windows: tuple[int, ...] = ()


class MediaFamily(ABC):
    """Picture or sound part of a projector file, by projector type. Subclasses set ``tower`` and
    ``projectors`` in ``__init__``.

    kind: "image" or "audio".
    names: further names of tensors in layers: the file's, and those in ``models``.
    decoders: ``general.architecture`` of the decoders that can read its media rows; empty: any.
    placeholders: texts of a rendered prompt that stand for one picture or sound, the longest first.
    row_mark: the special token that stands for each media row.
    marks: all special tokens of its media, which answers must not contain.
    stems: plans before the tower, such as convolutions, run one after the other; ``stem_input``
        makes the input rows of each. Empty: the tower reads the patches.
    stem_share: the stems' share of an encoding's work, 0 to 1, for progress reports.
    tower: the plan of the tower's layers.
    projectors: plans that make media rows of joined states: one for the tower's ``states``, then
        one for each layer of ``tower.deep``. Empty: the tower's results are the media rows.
    """

    kind: ClassVar[str] = "image"
    names: ClassVar[Mapping[str, str]] = {}
    decoders: ClassVar[frozenset[str]] = frozenset()
    placeholders: tuple[str, ...]
    row_mark: str
    marks: tuple[str, ...]
    stems: tuple[TowerConfig, ...] = ()
    stem_share: ClassVar[float] = 0.0
    tower: TowerConfig
    projectors: tuple[TowerConfig, ...] = ()

    def __init__(self, clip: ClipConfig) -> None:
        """Take one modality's part of a projector file; subclasses also check its keys and make the
        plans' configurations. Raises FileError for invalid keys, UnsupportedError for settings that
        treadle lacks.
        """
        self.clip = clip

    @property
    def n_deepstack(self) -> int:
        """Number of decoder layers after which deepstack rows are added."""
        return len(self.projectors[1:])

    @abstractmethod
    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Prepare a picture, uint8 ``[height, width, 3]``, for at most ``max_rows`` media rows;
        None: the family's default for CPUs. Sound families read samples, f32 ``[n]`` at 16 kHz.

        Raises TreadleError for a picture that the family cannot resize, and if ``max_rows`` is too
        small.
        """

    def pieces(self, patches: np.ndarray) -> Sequence[np.ndarray]:
        """Split one tower input's patches into the pieces that go through the stems one by one; by
        default a single one.
        """
        return [patches]

    def stem_input(self, stem: int, rows: np.ndarray) -> np.ndarray:
        """Return the input rows of stem number ``stem``, or, after the last stem, of the tower.
        ``rows``: a piece's patches for stem 0, else the results of the stem before.
        """
        return rows

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return the tower's inputs, besides the patches, for a grid of ``grid[0]`` rows and
        ``grid[1]`` columns of patches; of a sound: 1 and the number of rows.
        """
        return GridInputs()

    def projector_input(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the projector's input rows for one tower input, whose patches form ``grid``, from
        the tower's states ``[n_patches, n_embd]``; by default the states.
        """
        return states

    def compose(self, prepared: PreparedMedia, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the media rows ``[n_rows, width]`` of one picture or sound. ``rows``: those of
        each of its tower inputs; by default they follow one another unchanged.
        """
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def digest(self, data: np.ndarray, *settings: object) -> bytes:
        """Return ``PreparedMedia.digest`` for pixels or samples that were prepared with
        ``settings``.
        """
        clip = self.clip
        state = hashlib.sha256(clip.identity)
        about = clip.projector_type, clip.modality, data.shape, data.dtype.str, settings
        state.update(repr(about).encode())
        state.update(np.ascontiguousarray(data).data)
        return state.digest()


def square_table(clip: ClipConfig) -> np.ndarray:
    """Return the file's table of learned positions, f32 ``[side, side, n_embd]``, of a square of
    any ``side``. Raises FileError if it is missing or of another shape.
    """
    table = clip.floats(POSITION_TABLE)
    side = isqrt(len(table))
    if table.ndim != 2 or table.shape != (side * side, clip.n_embd):
        tensor = clip.gguf.tensors[POSITION_TABLE]
        raise tensor.error(f"shape {list(tensor.shape)}", f"[side * side, {clip.n_embd}]")
    return table.reshape(side, side, clip.n_embd)


__all__ = [
    "PATCHES",
    "POSITIONS",
    "POSITION_TABLE",
    "GridInputs",
    "MediaFamily",
    "PreparedMedia",
    "TowerInput",
    "square_table",
]
