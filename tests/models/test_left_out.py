"""What treadle leaves out is refused by name with the reason, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.test_config import fake
from treadle.convert.hf.config import read_config
from treadle.convert.hf.families.multimodal import OUTER
from treadle.convert.hf.families.registry import FAMILIES
from treadle.errors import UnsupportedError
from treadle.models.archs import ARCHS
from treadle.models.ignored_tensors import LEFT_OUT
from treadle.models.load import load_config

# Row 22 of the design's table, and what else people ask for.
NAMED = """
    kimi-k2 rwkv6 bart clip
    kimi_k2
    grok-1
"""


def test_what_is_there_is_not_left_out() -> None:
    assert not LEFT_OUT.keys() & {*ARCHS, *FAMILIES, *OUTER}
    assert {*NAMED.split()} <= LEFT_OUT.keys()


@pytest.mark.parametrize("name", LEFT_OUT)
def test_files(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        load_config(fake(name))
    said = f"architecture {name!r}: not supported: {LEFT_OUT[name]}"
    assert str(caught.value).endswith(said)
    assert len(said) < 180


@pytest.mark.parametrize("name", LEFT_OUT)
def test_folders(name: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        read_config({"model_type": name}, Path("config.json"))
    said = f"model_type {name!r}: not supported: {LEFT_OUT[name]}"
    assert str(caught.value) == f"config.json: {said}"


def test_the_text_part_of_a_folder() -> None:
    config = {"model_type": "mistral3", "text_config": {"model_type": "kimi_k2"}}
    with pytest.raises(UnsupportedError, match=r"text_config\.model_type 'kimi_k2': .*trillion"):
        read_config(config, Path("config.json"))
