"""Arguments of a call that is read whole."""

from __future__ import annotations

import json

import pytest
from jiter import from_json

from treadle.chat.tools.arguments import CallObject, arguments_of, read_call


def test_what_is_written_is_what_is_given() -> None:
    """Odd spaces, and a key that comes twice: as in the fragments of the same call."""
    arguments = '{ "a":1 ,"a" :  2}'
    written = f'{{"name": "f", "arguments": {arguments} }}'
    object = CallObject()
    object.walk(written)
    assert read_call(written, ["f"], object.arguments_at) == ("f", arguments)
    assert read_call('{"name": "f"}', ["f"], None) == ("f", "{}")
    assert read_call(written, ["g"], object.arguments_at) is None


@pytest.mark.parametrize("whole", ['{"a": 1, "b": [1, {"c": "x, {\\" y"}], "d": true}', "{}"])
def test_the_object_of_arguments_that_were_cut(whole: str) -> None:
    """As clients read it."""
    assert arguments_of("") == {}
    for end in range(1, len(whole) + 1):
        cut = whole[:end]
        assert arguments_of(cut) == from_json(cut.encode(), partial_mode=True)
    assert arguments_of(whole) == json.loads(whole)
    assert arguments_of("[1]") == arguments_of("nothing") == {}
