"""Each family on each instruction set of this machine: media rows and logits against the truth.

The other files run the default and the fastest without matrix registers. Kernels are tested on
every row by themselves, so by default a case meets one of the other rows, in turns; with
TREADLE_EMULATED=all it meets all of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.matrix_rounding import limit, sharp_isa
from tests.media import decoder_cases, media_cases, picture_cases, sound_cases
from tests.media.test_picture_families import check_rows as check_pictures
from tests.media.test_sound_families import check_rows as check_sounds
from tests.media.test_towers import check_rows
from treadle.isa import best, runnable
from treadle.jit.host import host_features

USUAL = {sharp_isa(), best(host_features()).name}
OTHERS = [row.name for row in runnable(host_features()) if row.name not in USUAL]

EVERY = os.environ.get("TREADLE_EMULATED") == "all"


def each(cases: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by case and row."""
    pairs = [
        pytest.param(case, isa, id=f"{getattr(case, 'name', case)}-{isa}")
        for i, case in enumerate(cases)
        for j, isa in enumerate(OTHERS)
        if EVERY or i % len(OTHERS) == j
    ]
    return pytest.mark.parametrize(("case", "isa"), pairs)


pytestmark = pytest.mark.slow


@each(media_cases.CASES)
def test_towers(case: media_cases.Case, isa: str, data: Path) -> None:
    projector = media_cases.opened(case, data, isa=isa)
    check_rows(case, projector, media_cases.truth_of(case, data))


@each(media_cases.CASES)
def test_towers_as_they_run_by_default(case: media_cases.Case, isa: str, data: Path) -> None:
    """With products of 16-bit whole numbers, where the row has them."""
    exact = media_cases.opened(case, data)
    projector = media_cases.opened(case, data, isa=isa, exact=False)
    prepared = projector.prepare(media_cases.picture(), case.max_rows)
    words = projector.towers["image"].engine.device.isa.dot_words
    found = media_cases.off(projector.encode(prepared), exact.encode(prepared))
    assert found < (1e-5 if words is None else 1e-3)


@each(picture_cases.CASES)
def test_towers_of_tiles(case: picture_cases.PictureCase, isa: str, data: Path) -> None:
    check_pictures(case, data, isa)


@each(sound_cases.CASES)
def test_towers_of_sound(case: sound_cases.SoundCase, isa: str, data: Path) -> None:
    projector = sound_cases.opened(case.name, data, isa=isa)
    check_sounds(case, projector, data)


@each(decoder_cases.CASES)
def test_decoders(case: decoder_cases.DecoderCase, isa: str, data: Path) -> None:
    media = data / "media"
    with decoder_cases.load(media, case, isa=isa) as model:
        prompt = decoder_cases.prompt_of(model, media, case)
        with model.session() as session:
            found = session.logits(prompt.ids)
        allowed = limit(case.tolerance, "F16", model.isa)
        assert decoder_cases.error(found, prompt.logits) < allowed
