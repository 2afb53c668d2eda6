"""Decoders with rows of pictures and sound: prompts, rows and logits of ``shared/data/media``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import treadle
from tests.matrix_rounding import sharp_isa
from treadle.convert.open import open_model
from treadle.kvcache.media import MediaEntry


@dataclass(frozen=True)
class DecoderCase:
    """One family: its marks in the prompt, where its rows are in ``truth.npz``, and how they are
    read.
    """

    name: str
    marks: tuple[str, ...]
    rows: tuple[str, ...] = ("projected",)
    spans: tuple[str, ...] = ()  # marks whose rows see each other
    deepstack: int = 0
    tolerance: float = 3e-6  # of logits, relative to the largest
    two: bool = False  # the truth has a second prompt, with two pictures

    def __str__(self) -> str:
        return self.name


POOLED = ("tower.pooled",)
CASES = (
    DecoderCase("gemma3", ("<image_soft_token>",), spans=("<image_soft_token>",), two=True),
    DecoderCase("gemma4", ("<|image|>",), spans=("<|image|>",), tolerance=3e-5),
    DecoderCase(
        "gemma4u",
        ("<|image|>", "<|audio|>"),
        ("projected", "projected.sound"),
        spans=("<|image|>",),
        tolerance=3e-5,
    ),
    DecoderCase("qwen2vl", ("<|image_pad|>",), POOLED, two=True),
    DecoderCase("qwen25vl", ("<|image_pad|>",), POOLED, two=True),
    DecoderCase("qwen3vl", ("<|image_pad|>",), POOLED, deepstack=2, two=True),
    DecoderCase("qwen35", ("<|image_pad|>",), POOLED, tolerance=3e-5),
    DecoderCase("glm4v", ("<|image|>",), POOLED, tolerance=3e-5),
    DecoderCase("smolvlm", ("<image>",)),
    DecoderCase("llava", ("<image>",)),
    DecoderCase("llavanext", ("<image>",)),
    DecoderCase("pixtral", ("[IMG]",), two=True),
    DecoderCase("mistral3", ("[IMG]",)),
    DecoderCase("internvl", ("<IMG_CONTEXT>",)),
    DecoderCase("lfm2vl", ("<image>",)),
    DecoderCase("llama4", ("<|patch|>",)),
    DecoderCase("qwen2audio", ("<|AUDIO|>",)),
    DecoderCase("voxtral", ("[AUDIO]",)),
    DecoderCase("qwen3asr", ("<|audio_pad|>",)),
)


@dataclass
class Prompt:
    """A prompt with its media entries (with rows), and the truth's logits of each token."""

    ids: list[int]
    entries: list[MediaEntry]
    logits: np.ndarray


def load(media: Path, case: DecoderCase, **settings: object) -> treadle.Model:
    """The family's decoder, with keys and values in float32, and all products of the files' F16
    weights: so ``tolerance`` holds on every CPU. ``isa=None`` takes the default.
    """
    given = {"kv": "f32", "threads": 1, "context": 512, "n_sequences": 4, "isa": sharp_isa()}
    given |= settings
    return treadle.load(media / case.name / "text.gguf", **given)  # type: ignore[arg-type]


def prompt_of(model: treadle.Model, media: Path, case: DecoderCase, prefix: str = "") -> Prompt:
    """The truth's prompt with ids of the model's media registry in place of marks. Each run of
    marks is an entry. ``prefix``: "two." for the prompt with two pictures.
    """
    truth = np.load(media / case.name / "truth.npz")
    ids = [int(each) for each in truth[f"{prefix}input_ids"][0]]
    rows = [_rows(media, case, truth, prefix, name) for name in case.rows]
    marks = [model.tokenize(mark, bos=False) for mark in case.marks]
    assert all(len(mark) == 1 for mark in marks), marks
    made = list(ids)
    entries = []
    used = [0] * len(marks)
    positions = truth.get(f"{prefix}position_ids")
    at = 0
    while at < len(ids):
        which = next((i for i, mark in enumerate(marks) if ids[at] == mark[0]), None)
        if which is None:
            at += 1
            continue
        end = at
        # The grid of a picture that follows another without text between them is not told apart.
        while end < len(ids) and ids[end] == ids[at]:
            end += 1
        n = end - at
        digest = f"{case.name} {prefix} {at}".encode().ljust(32, b".")[:32]
        relative = None
        advance = None
        if positions is not None:
            relative = (positions[:, at:end] - positions[0, at]).astype(np.int32)
            advance = int(positions[0, end] - positions[0, at])
        spans = ((0, n),) if case.marks[which] in case.spans else ()
        entry = model.engine.media.enter(MediaEntry(digest, n, relative, advance, spans))
        entry.rows = rows[which][used[which] : used[which] + n]
        used[which] += n
        entries.append(entry)
        made[at:end] = entry.ids
        at = end
    sizes = [len(each) for each in rows]
    assert used == sizes or case.name == "lfm2vl", (used, sizes)
    return Prompt(made, entries, truth[f"{prefix}logits"])


def _rows(
    media: Path, case: DecoderCase, truth: np.lib.npyio.NpzFile, prefix: str, name: str
) -> np.ndarray:
    """The rows in the prompt's order, float32 ``[n, n_embd * (1 + deepstack)]``."""
    if case.name == "llavanext":
        return _llavanext_rows(media, truth)
    plain = truth[f"{prefix}{name}"]
    rows = plain.reshape(-1, plain.shape[-1])
    deep = [truth[f"{prefix}deepstack.{i}"] for i in range(case.deepstack)]
    return np.ascontiguousarray(np.concatenate([rows, *deep], 1), np.float32)


def _llavanext_rows(media: Path, truth: np.lib.npyio.NpzFile) -> np.ndarray:
    """The whole picture's rows, then those of all tiles as one grid without its padding, with the
    newline's row at the end of each line.
    """
    with open_model(media / "llavanext" / "mmproj.gguf") as file:
        newline = file.tensors["v.image_newline"].dequantize().ravel()
    tiles = truth["projected"].reshape(5, 4, 4, -1)
    n_embd = tiles.shape[-1]
    grid = tiles[1:].reshape(2, 2, 4, 4, n_embd).transpose(0, 2, 1, 3, 4).reshape(8, 8, n_embd)
    kept = int(round(61 * (8 / 97), 7))
    padding = (8 - kept) // 2
    lines = grid[padding : 8 - padding]
    ends = np.broadcast_to(newline, (len(lines), 1, n_embd))
    rows = np.concatenate([lines, ends], 1).reshape(-1, n_embd)
    return np.concatenate([tiles[0].reshape(-1, n_embd), rows]).astype(np.float32)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest error by the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
