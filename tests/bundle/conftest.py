"""One bundle for the whole run, made of what is installed: that takes half a minute."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import WriteTiny


@pytest.fixture(scope="session")
def bundle(
    tiny: WriteTiny, one_kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A bundle of a tiny model. Skips the test where pex is missing, and fails it under CI."""
    if find_spec("pex") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("pex is not installed: .ci/run installs the extra dev")
        pytest.skip("pex is not installed: pip install 'treadle[bundle]'")
    from treadle.bundle.build import make_bundle

    made = tmp_path_factory.mktemp("bundle") / "talk"
    shutil.copy(tiny("llama", "Q8_0"), made.with_name("story.gguf"))
    make_bundle(made.with_name("story.gguf"), made)
    return made
