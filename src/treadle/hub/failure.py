"""Errors of the hub, as one line each: what failed, and what to do about it."""

from __future__ import annotations

from difflib import get_close_matches

from treadle.errors import FileError
from treadle.hub.name import HubName

LOGIN = "log in with 'hf auth login', or set HF_TOKEN (a token: {site}/settings/tokens)"


def explain(error: Exception, name: HubName) -> FileError:
    """Return a FileError that explains a failed request about ``name``, with what to do. Errors of
    the local disk are not handled here.
    """
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # the reason for the failed download, not the missing file
    site = constants.ENDPOINT
    login = LOGIN.format(site=site)
    if isinstance(error, errors.GatedRepoError):
        reason = f"is gated: accept its licence at {site}/{name.repo}, then {login}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = f"no such repository{similar(name)}; if it is private, {login}"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = f"the repository has no revision '{name.revision}'"
    elif isinstance(error, errors.RemoteEntryNotFoundError):
        reason = "no such file"
    elif constants.HF_HUB_OFFLINE:
        reason = "is not in the local cache, and HF_HUB_OFFLINE forbids a download"
    elif is_unreached(error):
        reason = f"cannot be downloaded: {site} does not answer ({first_line(error)})"
    elif isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401:
        reason = f"{site} rejects your token: {login}"
    elif isinstance(error, errors.HfHubHTTPError):
        reason = f"{site} answered HTTP status {error.response.status_code}: {first_line(error)}"
    else:
        reason = f"the download failed: {first_line(error)}"
    return FileError(reason, path=str(name))


def is_unreached(error: Exception) -> bool:
    """Return whether the server gave no answer, or its connection was lost.

    The HTTP library is the hub's own choice, so its exceptions are recognised by their names.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"TransportError", "ConnectionError", "TimeoutError"})


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; the name of its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def similar(name: HubName) -> str:
    """Return a suggestion for a repository that does not exist: up to 3 of the owner's repositories
    with similar names, as the end of a message; "" for none.
    """
    from huggingface_hub import HfApi

    owner, _, repo = name.repo.partition("/")
    words = repo.removesuffix("-GGUF").removesuffix("-gguf")
    try:
        found = [model.id for model in HfApi().list_models(author=owner, search=words, limit=20)]
    except Exception:  # only a suggestion: the first error is the one to show
        return ""
    names = [whole.partition("/")[2] for whole in found]
    near = get_close_matches(repo, names, n=3, cutoff=0.75)
    return f"; did you mean {' or '.join(f'hf:{owner}/{one}' for one in near)}?" if near else ""
