"""Cuts a window's ids into segments at timestamps, which also determine where the next window
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from treadle.base.fast_classes import dataclass
from treadle.speech.token_rules import STEP_S

LEAST_ADVANCE_S = 1.0
"""Seconds from one window's begin to the next one's, at least, so that the sound's end is
reached."""


@dataclass(frozen=True)
class SegmentSpan:
    """A segment's part of a window's ids, timestamps included. ``start``, ``end``: seconds from the
    window's beginning.
    """

    start: float
    end: float
    ids: tuple[int, ...]


@dataclass(frozen=True)
class CutWindow:
    """A window's segments.

    advance: seconds from this window's beginning to the next one's.
    is_open: whether the next window begins at this one's end, so that nothing is decoded again.
    """

    spans: tuple[SegmentSpan, ...]
    advance: float
    is_open: bool


def cut_window(
    ids: Sequence[int], timestamp_begin: int, seconds: float, *, whole: bool = False
) -> CutWindow:
    """Cut a window's ids at its pairs of timestamps, which stand where one segment ends and the
    next begins. ``timestamp_begin``: the id of 0.00 s; ``seconds``: length of the window's sound;
    ``whole``: keep the text after the last pair, as nothing of the window is decoded again.

    Text after the last pair is incomplete: it is dropped, and the next window begins at that pair,
    unless that would advance by less than ``LEAST_ADVANCE_S``. A single timestamp at the end means
    that no speech follows it.
    """
    stamps = [id >= timestamp_begin for id in ids]
    pairs = [i for i in range(1, len(ids)) if stamps[i] and stamps[i - 1]]
    ends_single = len(ids) >= 2 and stamps[-1] and not stamps[-2]

    def at(id: int) -> float:
        return (id - timestamp_begin) * STEP_S

    if not pairs:
        times = [at(id) for id, is_stamp in zip(ids, stamps, strict=True) if is_stamp]
        end = times[-1] if len(times) > 1 or (times and not stamps[0]) else seconds
        start = times[0] if times and stamps[0] else 0.0
        span = SegmentSpan(start, end if end > start else seconds, tuple(ids))
        return CutWindow((span,), seconds, True)
    cuts = [0, *pairs, *([len(ids)] if ends_single else [])]
    spans = []
    for first, last in pairwise(cuts):
        part = ids[first:last]
        start = at(part[0]) if stamps[first] else 0.0
        spans.append(SegmentSpan(start, at(part[-1]), tuple(part)))
    if ends_single:
        return CutWindow(tuple(spans), seconds, True)
    advance = at(ids[pairs[-1] - 1])
    if whole or advance < min(LEAST_ADVANCE_S, seconds):
        spans.append(SegmentSpan(at(ids[pairs[-1]]), seconds, tuple(ids[pairs[-1] :])))
        return CutWindow(tuple(spans), seconds, True)
    return CutWindow(tuple(spans), min(advance, seconds), False)
