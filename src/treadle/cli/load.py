"""From the MODEL that was typed to a loaded model: names, downloads, near misses, the bar."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import treadle
from treadle.cli import garbage_kept
from treadle.convert.open import is_hf
from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle.cli.progress import ProgressBar
    from treadle.model import Model


def is_model(word: str) -> bool:
    """Tell a MODEL from a PROMPT where only one of them was given."""
    if word.startswith("hf:") or os.path.isfile(word):
        return True
    if os.path.isdir(word):
        return is_hf(word)
    return word.endswith(".gguf") and not any(c.isspace() for c in word)


def find_model(ref: str, progress: ProgressBar | None = None) -> Path:
    """Return the file or Hugging Face directory that MODEL means; what ``hf:`` names is downloaded.

    Raises FileError, with the nearest names in the folder, if there is no such file.
    """
    if ref.startswith("hf:"):
        from treadle.hub import download

        return download(ref, progress=progress)
    path = Path(ref)
    if path.is_dir():
        if is_hf(path):
            return path
        raise FileError(f"is a folder, not a model{listing(path)}", path=ref)
    if not path.exists():
        raise FileError(f"no such file{near_names(path)}", path=ref)
    return path


def read_text(file: str) -> str:
    """The text of FILE, which must be UTF-8; of standard input, where it is "-"."""
    octets = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return octets.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError("is not UTF-8", path=file, offset=error.start, expected="a text") from error


def near_names(path: Path) -> str:
    """Suggest the files whose names are most like ``path``'s, else the models beside it."""
    from difflib import get_close_matches

    folder = path.parent
    if not folder.is_dir():
        return f" (nor the folder {folder})"
    # Letters' case is the commonest slip in a file name, so it does not count against a match.
    names = {entry.name.lower(): entry for entry in folder.iterdir() if entry.is_file()}
    near = get_close_matches(path.name.lower(), names, n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(str(names[name]) for name in near) + "?"
    return listing(folder)


def listing(folder: Path) -> str:
    """Name a few of the models in ``folder``, if it has any."""
    models = sorted(folder.glob("*.gguf"))
    if not models:
        return ""
    more = f" and {len(models) - 5} more" if len(models) > 5 else ""
    return "; there are " + ", ".join(map(str, models[:5])) + more


def load_model(ref: str | None, progress: ProgressBar, **settings: Any) -> Model:
    """Load the MODEL that was typed, or without one the model inside the package.

    ``settings`` are those of `treadle.load`; those that are None are left to it.
    """
    path = None if ref is None else find_model(ref, progress)
    given = {name: value for name, value in settings.items() if value is not None}
    with garbage_kept():
        model = treadle.load(path, progress=progress, **given)
    trained = model.config.n_ctx_train
    if given.get("context", 0) > trained:
        progress.close()
        print(
            f"treadle: warning: a context of {given['context']} tokens: {model.path.name} was "
            f"trained for {trained}; expect nonsense behind them",
            file=sys.stderr,
        )
    return model
