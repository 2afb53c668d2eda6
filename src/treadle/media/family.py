"""The base of projector families: preparation, what a tower is given, and the host's steps."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from math import isqrt
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from treadle.base.fast_dataclass import dataclass
from treadle.media.prepared import PreparedMedia, TowerInput
from treadle.models.towers.stages import POSITIONS

if TYPE_CHECKING:
    from treadle.media.clip_config import ClipConfig
    from treadle.models.towers.config import TowerConfig

PATCHES = "patch_embd"  # the product of the patches
POSITION_TABLE = "position_embd.weight"


@dataclass(frozen=True, eq=False)
class GridInputs:
    """Inputs of a tower for one grid of patches, besides the patches.

    rows: further given rows by name, f32 ``[n_patches, width]``, such as learned positions.
    ropes: for each rope table cosines and sines, f32 ``[n_patches, 2, dims / 2]``.
    windows: the first patches of the windows, in ascending order; empty without windows.
    """

    rows: Mapping[str, np.ndarray] = field(default_factory=dict)
    ropes: tuple[np.ndarray, ...] = ()
    windows: tuple[int, ...] = ()


class MediaFamily(ABC):
    """One projector type of one file. Subclasses set ``tower`` and ``projectors`` in ``__init__``.

    kind: ``PreparedMedia.kind`` of what it reads.
    names: further names of tensors in layers: the file's, and those in ``models``.
    decoders: ``general.architecture`` of the decoders that read its rows; empty: any.
    placeholders: texts of a rendered prompt that stand for one picture, the longest first.
    row_mark: the special token that stands for each media row.
    marks: all special tokens of its media, which answers must not contain.
    stems: plans that patches go through before the tower, such as convolutions, one behind the
        other, each of rows that ``lined_up`` makes. Empty: the tower is given the patches.
    stem_share: their part of an encoding's work, for its progress.
    tower: the plan that patches go through.
    projectors: plans that the joined states go through: those of the tower's ``states``, then one
        for each of ``tower.deep``. Empty: the tower's results are the media rows.
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
        """Check the file's keys. Raises FileError and UnsupportedError."""
        self.clip = clip

    @property
    def n_deepstack(self) -> int:
        """Layers of the decoder that media rows are added behind."""
        return len(self.projectors[1:])

    @abstractmethod
    def prepare(self, pixels: np.ndarray, max_rows: int | None) -> PreparedMedia:
        """Prepare a picture, uint8 ``[height, width, 3]``, for at most ``max_rows`` media rows;
        None: the family's default for CPUs. Sound families take samples, f32 ``[n]`` at 16 kHz.

        Raises TreadleError for a picture that the family cannot resize.
        """

    def pieces(self, patches: np.ndarray) -> Sequence[np.ndarray]:
        """Return one tower input's patches in pieces, which go through the stems one by one."""
        return [patches]

    def lined_up(self, stage: int, rows: np.ndarray) -> np.ndarray:
        """Return the rows that stem number ``stage`` is given, or the tower behind the last one:
        from a piece's patches for the first, else from the results of the stem before.
        """
        return rows

    def grid_inputs(self, grid: tuple[int, int]) -> GridInputs:
        """Return what the tower is given for a grid, besides its patches."""
        return GridInputs()

    def joined(self, states: np.ndarray, grid: tuple[int, int]) -> np.ndarray:
        """Return the projector's rows of one tower input, from its states."""
        return states

    def composed(self, prepared: PreparedMedia, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the media rows ``[n_rows, width]`` from those of each tower input."""
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def digest(self, data: np.ndarray, *settings: object) -> bytes:
        """Return ``PreparedMedia.digest`` of pixels or samples, prepared with ``settings``."""
        clip = self.clip
        state = hashlib.sha256(clip.identity)
        about = clip.projector_type, clip.modality, data.shape, data.dtype.str, settings
        state.update(repr(about).encode())
        state.update(np.ascontiguousarray(data).data)
        return state.digest()


def square_table(clip: ClipConfig) -> np.ndarray:
    """Return the learned positions of a square of any side, f32 ``[side, side, n_embd]``. Raises
    FileError if the table is missing or of another shape.
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
