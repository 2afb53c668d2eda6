"""Install packages into the environment of this Python: by uv where the environment has it, a tenth
of pip's processor time, else by pip.

    ENVIRONMENT/bin/python tools/install.py [PIP'S ARGUMENTS] NAME ...

Both read the registries and the limits that pip is set up for. pip does it too where uv fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--quiet"]
# uv's options by pip's settings.
OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraints",
}


def uv_options(settings: str, variables: Mapping[str, str]) -> list[str]:
    """Return uv's options for the registries and limits that pip is set up for. ``settings``: the
    output of ``pip config list``; ``variables``: the environment's, which stand above files.
    """

    def setting(key: str) -> str:
        variable = variables.get(f"PIP_{key.upper().replace('-', '_')}", "")
        # Those of ``install`` stand behind those of ``global``, and above them.
        found = re.findall(rf"^(?:global|install)\.{key}='(.*)'$", settings, re.MULTILINE)
        return variable or (found[-1] if found else "")

    options: list[str] = []
    for key, option in OPTIONS.items():
        for value in dict.fromkeys(filter(None, re.split(r"\s+|\\n", setting(key)))):
            options += [option, value]
    if setting("no-index").lower() in ("1", "true", "yes", "on"):
        options.append("--no-index")
    # pip takes the newest release of all registries, uv by default that of the first.
    return [*options, "--index-strategy", "unsafe-best-match"]


def install(arguments: list[str]) -> int:
    """Install what ``pip install`` would with these arguments; return the exit status."""
    if find_spec("uv"):
        listed = [sys.executable, "-m", "pip", "config", "list"]
        settings = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", sys.executable]
        if not subprocess.run([*uv, *uv_options(settings, os.environ), *arguments]).returncode:
            return 0
        print("uv failed: installing with pip", flush=True)
    return subprocess.run([*PIP, "install", "--no-compile", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(install(sys.argv[1:]))
