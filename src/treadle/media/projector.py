"""Opens projector files, and encodes pictures and sounds as rows that a decoder reads."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from treadle.base.fork_safety import UseLock
from treadle.errors import FileError, TreadleError, UnsupportedError
from treadle.files.gguf import GGUF, open_gguf
from treadle.files.metadata import MetadataReader
from treadle.files.safetensors import read_json
from treadle.files.splits import CONFIG, is_hf
from treadle.media.clip_config import AUDIO, VISION, read_clip
from treadle.media.families import family_of, hf_names_of, unsupported_type
from treadle.media.hf_projector import HfProjector, open_hf_projector
from treadle.media.tower_engine import GIVEN, MOST_ITEMS, STATES, Report, RunItem, TowerEngine, deep
from treadle.models.structure import layer_of

if TYPE_CHECKING:
    from treadle.devices.protocol import Device
    from treadle.media.family import MediaFamily
    from treadle.media.mel_input import MelInput
    from treadle.media.prepared import PreparedMedia, TowerInput
    from treadle.models.config import Config

    AnyInput = TowerInput | MelInput

KINDS = {VISION: "image", AUDIO: "audio"}
NONE: Mapping[str, str] = {}
# Tensors outside layers that change a tower's result, in llama.cpp too.
OUTER_TENSORS = frozenset(
    {
        "class_embd",
        "class_embd.weight",
        "norm_embd.weight",
        "patch_embd.bias",
        "post_ln.weight",
        "pre_ln.weight",
    }
)
MOST_GRIDS = 16  # grids whose inputs are cached
TURN_S = 0.001  # seconds to wait for another encoding before yielding
MAX_RUN_PATCHES = 4096  # patches of equal grids in one run, unless a single grid has more


class MediaTower:
    """One modality of a projector file: its family, and the engines that run its plans."""

    def __init__(
        self, family: MediaFamily, device: Device, lock: UseLock, *, exact: bool = False
    ) -> None:
        self.family = family
        gguf = family.clip.gguf
        self.engine = TowerEngine(gguf, family.tower, device, exact=exact, lock=lock)
        self.stems, self.projectors = (
            [TowerEngine(gguf, config, device, exact=exact, lock=lock) for config in configs]
            for configs in (family.stems, family.projectors)
        )
        # Cached by grid: interpolating the positions of a new one takes tenths of a second.
        self.grid_inputs = lru_cache(MOST_GRIDS)(family.grid_inputs)
        self._refuse_unused()
        for engine in self.projectors[1:]:
            if engine.width != self.width:
                what = f"deepstack rows of {engine.width} values"
                raise FileError(what, path=gguf.path, expected=f"{self.width}, as media rows")

    def _refuse_unused(self) -> None:
        """Raise FileError if the file has a tensor of the tower that no plan reads: the model then
        has a part that the family lacks.
        """
        clip = self.family.clip
        engines = (*self.stems, self.engine, *self.projectors)
        unused = set.intersection(*(set(engine.config.ignored) for engine in engines))
        for name in sorted(unused - clip.read):
            if 0 <= layer_of(name)[0] < clip.n_layer or name in OUTER_TENSORS:
                tensor = clip.gguf.tensors[name]
                expected = f"only tensors that {clip.projector_type} files have"
                raise tensor.error("nothing reads this tensor", expected)

    @property
    def width(self) -> int:
        """Width of the media rows, without deepstack rows."""
        return (self.projectors or [self.engine])[0].width

    def close(self) -> None:
        """Release plans and weights."""
        for engine in (*self.stems, self.engine, *self.projectors):
            engine.close()

    def encode(
        self, prepared: Sequence[PreparedMedia], report: Report | None = None
    ) -> Generator[None, None, list[np.ndarray]]:
        """Encode pictures or sounds together. Yield between slices of the work; return the media
        rows of each, f32 ``[n_rows, width * (1 + n_deepstack)]``. ``report``: is called with the
        share of the work that is done, 0 to 1, as in ``Projector.encode_runs``.
        """
        branches: list[list[np.ndarray]] = [[] for _ in range(1 + self.family.n_deepstack)]
        runs = self._runs([each for one in prepared for each in one.inputs])
        for i, inputs in enumerate(runs):
            found = yield from self._run(inputs, report and partial(_as_part, report, i, len(runs)))
            for rows, made in zip(branches, found, strict=True):
                rows += made
        made = []
        at = 0
        for one in prepared:
            end = at + len(one.inputs)
            composed = [self.family.compose(one, rows[at:end]) for rows in branches]
            made.append(np.ascontiguousarray(np.concatenate(composed, axis=1), np.float32))
            at = end
        return made

    def warm(self, prepared: PreparedMedia) -> None:
        """Compile the plans that ``encode`` runs for this picture or sound."""
        for engine, rows in self.engine_runs(prepared):
            engine.warm(sum(rows))

    def engine_runs(self, prepared: PreparedMedia) -> Iterator[tuple[TowerEngine, list[int]]]:
        """Yield the runs that encode a picture or sound, in order, as (engine, number of rows of
        each of the run's items).
        """
        for inputs in self._runs(prepared.inputs):
            if self.stems:
                for each in inputs:
                    yield from self._stem_runs(each)
            yield self.engine, [inputs[0].n_rows] * len(inputs)
            states = np.zeros((inputs[0].n_rows, self.engine.width), np.float32)
            n_rows = len(self.family.projector_input(states, inputs[0].grid))
            for engine in self.projectors:
                yield engine, [n_rows * len(inputs)]

    def _stem_runs(self, one: AnyInput) -> Iterator[tuple[TowerEngine, list[int]]]:
        for rows in self.family.pieces(one.patches):
            for i, engine in enumerate(self.stems):
                n = len(self.family.stem_input(i, rows))
                yield engine, [n]
                rows = np.zeros((n, engine.width), np.float32)

    def _runs(self, inputs: Sequence[AnyInput]) -> list[list[AnyInput]]:
        """Group adjacent inputs of equal grids into runs, of at most MOST_ITEMS inputs and
        MAX_RUN_PATCHES patches.
        """
        runs = []
        for _, group in groupby(inputs, key=lambda each: each.grid):
            alike = list(group)
            n = min(MOST_ITEMS, max(1, MAX_RUN_PATCHES // alike[0].n_rows))
            runs += [alike[at : at + n] for at in range(0, len(alike), n)]
        return runs

    def _run(
        self, inputs: Sequence[AnyInput], report: Report | None
    ) -> Generator[None, None, list[list[np.ndarray]]]:
        """Run stems, tower and projectors on inputs of equal grids, yielding between slices of the
        work. Return, for each branch (the media rows, then each deepstack layer), a list of each
        input's rows.
        """
        grid = inputs[0].grid
        of = self.grid_inputs(grid)
        n = len(inputs)
        patches = [each.patches for each in inputs]
        if self.stems:
            patches = yield from self._through_stems(inputs, report)
            share = self.family.stem_share
            report = report and partial(_report_rest, report, share)
        given = {GIVEN: _stacked(patches)}
        given |= {name: _stacked([rows] * n) for name, rows in of.rows.items()}
        ropes = [_stacked([rows] * n) for rows in of.ropes]
        items = [RunItem(each.n_rows, of.windows) for each in inputs]
        found = yield from self.engine.run(given, items, ropes, report)
        names = (STATES, *map(deep, self.engine.config.deep))
        states = [np.split(found[name], n) for name in names]
        joined = ([self.family.projector_input(each, grid) for each in branch] for branch in states)
        if not self.projectors:
            return list(joined)
        made = []
        for engine, rows in zip(self.projectors, joined, strict=True):
            whole = _stacked(rows)
            result = yield from engine.run({GIVEN: whole}, [RunItem(len(whole))])
            made.append(np.split(result[STATES], n))
        return made

    def _through_stems(
        self, inputs: Sequence[AnyInput], report: Report | None
    ) -> Generator[None, None, list[np.ndarray]]:
        """Run the stems, yielding between slices of the work; return each input's rows for the
        tower, ``[n_rows, width]``.
        """
        family = self.family
        pieces = [family.pieces(each.patches) for each in inputs]
        n_pieces = sum(map(len, pieces))
        n_done = 0
        made = []
        for one, of_one in zip(inputs, pieces, strict=True):
            rows = []
            for states in of_one:
                for i, engine in enumerate(self.stems):
                    given = family.stem_input(i, states)
                    found = yield from engine.run({GIVEN: given}, [RunItem(len(given))])
                    states = found[STATES]
                rows.append(family.stem_input(len(self.stems), states))
                n_done += 1
                if report is not None:
                    report(family.stem_share * n_done / n_pieces)
            # A sound's last piece may have rows after its end, which the tower does not read.
            made.append(np.concatenate(rows)[: one.n_rows])
        return made


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays concatenated along the first axis; a single one without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _as_part(report: Report, i: int, n_parts: int, share: float) -> None:
    """Report the progress of ``n_parts`` equal parts: parts before ``i`` are done, and part ``i``
    to the share ``share``, 0 to 1.
    """
    report((i + share) / n_parts)


def _report_rest(report: Report, first: float, share: float) -> None:
    """Report the progress of work whose first part, a share ``first`` of it, is done, and whose
    rest is done to the share ``share``; both are 0 to 1.
    """
    report(first + (1 - first) * share)


class Projector:
    """An opened projector file. Thread-safe: only one encoding runs at a time; others wait.

    towers: the towers of the file's supported modalities, by "image" and "audio".
    unread: error messages for the file's other modalities, by "image" and "audio".
    """

    def __init__(
        self, gguf: GGUF, towers: Mapping[str, MediaTower], unread: Mapping[str, str] = NONE
    ) -> None:
        self.gguf = gguf
        self.towers = towers
        self.unread = unread
        self._lock = Lock()

    @property
    def modalities(self) -> tuple[str, ...]:
        """The kinds of media that the projector encodes: "image", "audio"."""
        return tuple(self.towers)

    def family(self, kind: str) -> MediaFamily:
        """Return the family for a kind of media, "image" or "audio". Raises TreadleError if the
        file has no part for it, or one that is not supported.
        """
        return self._tower(kind).family

    def _tower(self, kind: str) -> MediaTower:
        if kind not in self.towers:
            if kind in self.unread:
                raise UnsupportedError(self.unread[kind])
            have = " and ".join(self.modalities)
            raise TreadleError(f"{self.gguf.path}: reads no {kind}, only {have}")
        return self.towers[kind]

    def check(self, config: Config) -> None:
        """Raise TreadleError if the media rows do not fit a decoder: its architecture, width or
        deepstack layers.
        """
        for kind, tower in self.towers.items():
            family = tower.family
            name = config.arch.name
            if family.decoders and name not in family.decoders:
                of = ", ".join(sorted(family.decoders))
                what = f"its {kind} rows are for models of type {of}"
                raise TreadleError(f"{self.gguf.path}: {what}; this model is {name}")
            if family.n_deepstack != config.media.n_deepstack and kind == "image":
                what = f"its rows are for {family.n_deepstack} layers"
                have = config.media.n_deepstack
                raise TreadleError(f"{self.gguf.path}: {what}; the model takes them in {have}")
            if tower.width != config.n_embd:
                what = f"its {kind} rows have {tower.width} values"
                raise TreadleError(f"{self.gguf.path}: {what}; the model's have {config.n_embd}")

    def prepare(
        self, data: np.ndarray, max_rows: int | None = None, kind: str = "image"
    ) -> PreparedMedia:
        """Prepare a picture, uint8 ``[height, width, 3]``, or a sound, f32 ``[n]`` at 16 kHz, as
        ``MediaFamily.prepare`` does. Its grids' positions are computed and cached too, so that this
        does not delay other requests during the encoding.
        """
        tower = self._tower(kind)
        prepared = tower.family.prepare(data, max_rows)
        for grid in {each.grid for each in prepared.inputs}:
            tower.grid_inputs(grid)
        return prepared

    def encode_runs(
        self, prepared: Sequence[PreparedMedia], report: Report | None = None
    ) -> Generator[None, None, list[np.ndarray]]:
        """Encode several pictures, or several sounds, together. Yield between slices of about 50 ms
        of work; return for each f32 ``[n_rows, n_embd * (1 + n_deepstack)]``: the media rows and,
        beside them, the rows that each deepstack layer adds. The bits are those of encoding each
        alone. ``report`` is called after each slice with the share of the work that is done, 0 to
        1.

        Raises FileError if the file shrank or was written to, TreadleError if it is closed. Another
        encoding waits, yielding, until this one has ended or its generator is closed.
        """
        tower = self._tower(prepared[0].kind)
        if self.gguf.closed:
            raise TreadleError("the projector is closed")
        while not self._lock.acquire(timeout=TURN_S):
            yield
        try:
            rows = yield from tower.encode(prepared, report)
        finally:
            self._lock.release()
        return rows

    def warm(self, prepared: PreparedMedia) -> None:
        """Compile the plans that ``encode_runs`` runs for this picture or sound, and for others of
        the same size.
        """
        self._tower(prepared.kind).warm(prepared)

    def encode(self, prepared: PreparedMedia) -> np.ndarray:
        """Return the media rows of one picture or sound, f32 ``[n_rows, n_embd * (1 +
        n_deepstack)]``, as ``encode_runs`` does.
        """
        runs = self.encode_runs([prepared])
        while True:
            try:
                next(runs)
            except StopIteration as done:
                (rows,) = done.value
                made: np.ndarray = rows
                return made

    def close(self) -> None:
        """Release plans, weights and the file; the device stays open."""
        for tower in self.towers.values():
            tower.close()
        self.gguf.close()


def open_projector_file(path: str | os.PathLike[str]) -> GGUF:
    """Open a GGUF projector file, or the picture and sound parts of a Hugging Face folder. Raises
    FileError for a damaged file, UnsupportedError for a folder of an unknown kind.
    """
    if not is_hf(path):
        return open_gguf(path)
    given = Path(os.path.expanduser(path))
    config = (given if given.is_dir() else given.parent) / CONFIG
    kind = MetadataReader(read_json(config), config).text("model_type", "")
    return open_hf_projector(path, hf_names_of(kind, str(config)))


def open_projector(
    source: str | os.PathLike[str] | GGUF,
    device: Device,
    *,
    exact: bool = False,
    lock: UseLock | None = None,
) -> Projector:
    """Open a projector: a path of a GGUF, a Hugging Face folder, or an open file.

    ``exact``: all products in f32; otherwise F16 matrices and attention may be multiplied as 16-bit
    whole numbers (``int16`` of ``Device.plan``). ``lock``: held while the device runs; pass the
    engine's if they share a device.

    If only one of a file's picture and sound parts is supported, the projector has that one. Raises
    FileError for a damaged file, UnsupportedError for one of another kind or projector type.
    """
    gguf = source if isinstance(source, GGUF) else open_projector_file(source)
    try:
        towers, unread = _towers(gguf, device, lock or UseLock(), exact=exact)
    except BaseException:
        if gguf is not source:
            gguf.close()
        raise
    return Projector(gguf, towers, unread)


def _towers(
    gguf: GGUF, device: Device, lock: UseLock, *, exact: bool
) -> tuple[dict[str, MediaTower], dict[str, str]]:
    """Return two dicts by "image" and "audio": the towers of the file's supported modalities, and
    error messages for the others. Raises UnsupportedError if none is supported. ``exact`` and
    ``lock``: as in ``open_projector``.
    """
    towers = {}
    unsupported: dict[str, UnsupportedError] = {}
    left_out = gguf.left_out if isinstance(gguf, HfProjector) else {}
    for modality, kind in left_out.items():
        unsupported[KINDS[modality]] = unsupported_type(kind, f"{gguf.path}")
    for modality, clip in read_clip(gguf).items():
        try:
            family_type = family_of(clip.projector_type, f"{gguf.path}")
        except UnsupportedError as error:
            unsupported[KINDS[modality]] = error
            continue
        towers[KINDS[modality]] = MediaTower(family_type(clip), device, lock, exact=exact)
    if not towers:
        raise next(iter(unsupported.values()))
    return towers, {kind: str(error) for kind, error in unsupported.items()}


__all__ = ["MediaTower", "Projector", "open_projector", "open_projector_file"]
