"""Models by name: ``hf:owner/repo/file.gguf`` is downloaded once and found again from then on.

huggingface_hub does the work, so its cache, its tokens and its variables (``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_HOME`` ...) mean here what they mean everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from treadle.errors import FileError

ProgressCallback = Callable[[str, int, int], None]

SHARD = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_SHARDS = 1000  # far above any real model: a name alone must not ask for 99,999 downloads


@dataclass(frozen=True)
class HubFile:
    """A file in a repository of the hub, as named by ``hf:owner/repo[@revision]/path``."""

    repo: str  # owner/name
    path: str  # within the repository
    revision: str | None = None

    def __str__(self) -> str:
        """Write the name as a user types it."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{revision}/{self.path}"

    def shards(self) -> list[str]:
        """List the paths of all the shards of a split model; of any other file, its own path."""
        match = SHARD.match(self.path)
        if match is None:
            return [self.path]
        count = int(match["count"])
        if not 1 <= int(match["index"]) <= count <= MAX_SHARDS:
            raise FileError(
                "the shard's number does not fit its name",
                path=str(self),
                expected=f"1 to the shard count, at most {MAX_SHARDS} shards",
            )
        return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def parse(ref: str) -> HubFile:
    """Read ``hf:owner/repo[@revision]/path/to/file.gguf``; raises FileError if it is not that."""
    expected = "hf:owner/repo/file.gguf"
    parts = ref.removeprefix("hf:").split("/", 2)
    if not ref.startswith("hf:") or len(parts) < 2 or not all(parts[:2]):
        raise FileError("not the name of a file on the hub", path=ref, expected=expected)
    name, _, revision = parts[1].partition("@")
    path = parts[2] if len(parts) == 3 else ""
    return HubFile(f"{parts[0]}/{name}", path, revision or None)


def download(ref: str, *, progress: ProgressCallback | None = None) -> Path:
    """Return the local path of ``hf:owner/repo/file.gguf``, downloading what is not here yet.

    Of a split model every shard is fetched, and the first one's path is returned. ``progress``
    is called with a stage, the bytes done and the bytes in all. Raises FileError, naming the
    repository's models if there is no such file.
    """
    from huggingface_hub import errors, hf_hub_download

    file = parse(ref)
    if not file.path:
        raise FileError(f"names a repository, not a file{models_in(file)}", path=ref)
    try:
        paths = [
            hf_hub_download(
                file.repo, shard, revision=file.revision, tqdm_class=reporter(shard, progress)
            )
            for shard in file.shards()
        ]
    except errors.LocalEntryNotFoundError as error:
        reason = "cannot be downloaded now (offline?), and is not in the local cache"
        raise FileError(reason, path=ref) from error
    except errors.EntryNotFoundError as error:
        raise FileError(f"no such file{models_in(file)}", path=ref) from error
    except errors.GatedRepoError as error:
        raise FileError("needs a licence accepted on the hub, and a token", path=ref) from error
    except errors.RepositoryNotFoundError as error:
        reason = "no such repository, or it is private and needs a token"
        raise FileError(reason, path=ref) from error
    except errors.RevisionNotFoundError as error:
        raise FileError(f"no revision '{file.revision}'", path=ref) from error
    except Exception as error:
        if isinstance(error, OSError) and error.filename:  # our own disk: full, or not writable
            raise
        # The HTTP library below is the hub's own choice, so its exceptions have no name here.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise FileError(f"the download failed: {lines[0]}", path=ref) from error
    return Path(paths[0])


def models_in(file: HubFile) -> str:
    """Suggest a model of the repository: the names most like the wanted one, else a few."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(file.repo, revision=file.revision)
    except Exception:  # a suggestion only: whatever went wrong, the first error is the one to show
        return ""
    models = [name for name in names if name.endswith(".gguf")]
    near = get_close_matches(file.path, models, n=3) if file.path else []
    if near:
        return f"; did you mean {' or '.join(near)}?"
    if not models:
        return "; the repository has no .gguf file"
    more = f" and {len(models) - 8} more" if len(models) > 8 else ""
    return "; there are " + ", ".join(models[:8]) + more


def reporter(name: str, progress: ProgressCallback | None) -> Any:
    """Make a class that huggingface_hub takes for tqdm's, and that only reports to ``progress``."""

    class Report:
        def __init__(self, *, total: float | None = None, initial: float = 0, **_: Any) -> None:
            self.total, self.n = total, initial
            self.update(0)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None:
                progress(f"downloading {name}", int(self.n), int(self.total or 0))

        def __enter__(self) -> Report:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

        def close(self) -> None:
            if progress is not None and self.total:  # the bar goes, whatever way this ended
                progress(f"downloading {name}", int(self.total), int(self.total))

    return Report
