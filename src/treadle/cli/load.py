"""From the MODEL that was typed to a loaded model: names, downloads, near misses, the bar."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import FileError

if TYPE_CHECKING:
    from treadle import Model
    from treadle.cli.progress import ProgressBar


def is_model(word: str) -> bool:
    """Tell a MODEL from a PROMPT where only one of them was given."""
    if word.startswith("hf:") or os.path.isfile(word):
        return True
    return word.endswith(".gguf") and not any(c.isspace() for c in word)


def packaged_model() -> Path:
    """Return the path of the small model that ships inside the package."""
    folder = Path(__file__).resolve().parent.parent / "data"
    models = sorted(folder.glob("*.gguf"))
    if not models:
        raise FileError("this build of treadle ships no model: name one", path=folder)
    return models[0]


def find_model(ref: str | None, progress: ProgressBar | None = None) -> Path:
    """Return the file that MODEL means; ``None`` is the packaged model, ``hf:`` is downloaded.

    Raises FileError, with the nearest names in the folder, if there is no such file.
    """
    if ref is None:
        return packaged_model()
    if ref.startswith("hf:"):
        from treadle.hub import download

        return download(ref, progress=progress)
    path = Path(ref)
    if path.is_dir():
        raise FileError(f"is a folder, not a model{listing(path)}", path=ref)
    if not path.exists():
        raise FileError(f"no such file{near_names(path)}", path=ref)
    return path


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
    """Load the MODEL that was typed; ``settings`` are those of `treadle.load`, None left out."""
    import treadle

    path = find_model(ref, progress)
    given = {name: value for name, value in settings.items() if value is not None}
    return treadle.load(path, progress=progress, **given)
