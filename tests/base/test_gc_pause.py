"""Pauses of the garbage collector, and imports that are never collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from treadle.base import gc_pause
from treadle.base.gc_pause import garbage_kept, imports_kept, own_process


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """State of a process that runs treadle alone; the test's own objects are unfrozen after it."""
    monkeypatch.setattr(gc_pause, "_process", {"is_ours": False})
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("alone")
def test_only_a_process_of_its_own_keeps_imports_for_ever() -> None:
    before = gc.get_freeze_count()
    with imports_kept():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
    own_process()
    with garbage_kept():
        assert not gc.isenabled()
    assert gc.get_freeze_count() == before
    with imports_kept():
        made = [[i] for i in range(10)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


@pytest.mark.usefixtures("alone")
def test_a_failed_import_ends_the_pause() -> None:
    own_process()
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), imports_kept():
        raise ImportError
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
