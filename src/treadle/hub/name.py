"""Name of a model on the hub, as the user types it: ``hf:OWNER/REPO[@REVISION][:TYPE][/PATH]``."""

from __future__ import annotations

import re

from treadle.base.fast_classes import dataclass
from treadle.errors import FileError
from treadle.files.splits import SHARD, shard_name

MAX_SHARDS = 1000  # far above any real model: a name alone must not cause 99,999 downloads
FORMS = "hf:OWNER/REPO, hf:OWNER/REPO:Q4_K_M or hf:OWNER/REPO/FILE.gguf"
WEBSITES = ("https://huggingface.co/", "https://hf.co/", "huggingface.co/", "hf.co/", "//")
NAME = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A parsed name: a repository of the hub, or the file, folder or type in it that the user
    named.
    """

    repo: str  # OWNER/REPO
    path: str = ""  # file or folder within the repository; "": none named
    revision: str | None = None  # branch, tag or commit; None: the main branch
    tag: str = ""  # type of weights: "Q4_K_M"; "": none named

    def __str__(self) -> str:
        """Return the name as a user types it."""
        tag = f":{self.tag}" if self.tag else ""
        path = f"/{self.path}" if self.path else ""
        return f"{self.root}{tag}{path}"

    @property
    def root(self) -> str:
        """The name of the repository as a user types it, with the revision:
        ``hf:OWNER/REPO@REVISION``.
        """
        return f"hf:{self.repo}" + (f"@{self.revision}" if self.revision else "")

    def shards(self) -> list[str]:
        """Return the paths of all shards if ``path`` is a shard of a split model, else ``[path]``.
        Raises FileError for a shard number out of range.
        """
        match = SHARD.fullmatch(self.path)
        if match is None:
            return [self.path]
        count = int(match["count"])
        if not 1 <= int(match["no"]) <= count <= MAX_SHARDS:
            raise FileError(
                "the shard number is out of range",
                path=str(self),
                expected=f"1 to the shard count, at most {MAX_SHARDS} shards",
            )
        return [shard_name(match["stem"], i, count) for i in range(count)]


def parse(ref: str) -> HubName:
    """Parse a name ``hf:...``, or a web page's address after ``hf:``. Raises FileError, with the
    valid forms, for other texts.
    """
    rest = ref.removeprefix("hf:")
    for website in WEBSITES:
        rest = rest.removeprefix(website)
    parts = rest.rstrip("/").split("/", 2)
    if not ref.startswith("hf:") or len(parts) < 2:
        raise FileError("not the name of a model on the hub", path=ref, expected=FORMS)
    rest, _, tag = parts[1].partition(":")
    name, _, revision = rest.partition("@")
    path = parts[2] if len(parts) == 3 else ""
    if not NAME.fullmatch(parts[0]) or not NAME.fullmatch(name) or (tag and path):
        raise FileError("not the name of a model on the hub", path=ref, expected=FORMS)
    pasted = re.match(r"(?:blob|resolve|tree)/([^/]+)/?(.*)", path)  # a web page's address
    if pasted and not revision:
        revision = "" if pasted[1] == "main" else pasted[1]
        path = pasted[2]
    return HubName(f"{parts[0]}/{name}", path, revision or None, tag)


def check_no_address(ref: str) -> None:
    """Raise FileError if ``ref``, which is no path on this machine, is a web address: with the
    ``hf:`` name of a page of the hub.
    """
    if "://" not in ref:
        return
    use = "download the file, and give its path"
    if ref.startswith(WEBSITES):
        try:
            use = f"use {parse(f'hf:{ref}')}"
        except FileError:  # a page of the hub that is no model's
            use = f"use {FORMS}"
    raise FileError(f"a web address: {use}", path=ref)
