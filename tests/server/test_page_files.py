"""What a server keeps in files: pages for their owner alone, without keys and without texts."""

from __future__ import annotations

import stat
from pathlib import Path

import treadle
from tests.server.conftest import running, talking
from treadle.kernels.run_state import PAGE

KEY = "sk-xyzzy-swordfish"
TEXT = "plugh plover frotz "
USER = "a user of the name rezrov"


def test_page_files_hold_no_secret_and_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    with treadle.load(threads=1, context=512, cache_dir=folder, cache_bytes=1 << 28) as model:
        prompt = TEXT * 20
        n_pages = len(model.tokenize(prompt)) // PAGE
        assert n_pages > 1
        with running(model, api_keys=(KEY,)) as service, talking(service) as client:
            body = {"prompt": prompt, "max_tokens": 2, "user": USER}
            headers = {"authorization": f"Bearer {KEY}"}
            assert client.post("/v1/completions", json=body, headers=headers).status_code == 200
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) >= n_pages
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        raw = path.read_bytes()
        for secret in (*KEY.split("-"), *TEXT.split(), "rezrov"):
            assert len(secret) < 4 or secret.encode() not in raw, path
        assert path.suffix == ".page"
