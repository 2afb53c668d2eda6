"""Arguments of a call that is read whole."""

from __future__ import annotations

from treadle.speech.arguments import CallObject, read_call


def test_what_is_written_is_what_is_given() -> None:
    """Odd spaces, and a key that comes twice: as in the fragments of the same call."""
    arguments = '{ "a":1 ,"a" :  2}'
    written = f'{{"name": "f", "arguments": {arguments} }}'
    object = CallObject()
    object.walk(written)
    assert read_call(written, ["f"], object.arguments_at) == ("f", arguments)
    assert read_call('{"name": "f"}', ["f"], None) == ("f", "{}")
    assert read_call(written, ["g"], object.arguments_at) is None
