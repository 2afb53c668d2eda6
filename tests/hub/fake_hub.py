"""A stand-in for the Hugging Face hub, on this machine."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"

REPOS: dict[str, dict[str, bytes]] = {
    "owner/repo": {
        "tiny-Q8_0.gguf": b"GGUF whole",
        "split/big-00001-of-00003.gguf": b"GGUF one",
        "split/big-00002-of-00003.gguf": b"GGUF two",
        "split/big-00003-of-00003.gguf": b"GGUF three",
        "README.md": b"no model",
    },
    "owner/types-GGUF": {
        "types-Q8_0.gguf": b"GGUF eight",
        "types-Q4_K_M.gguf": b"GGUF four",
        "types-F16.gguf": b"GGUF sixteen",
        "IQ2_M/types-IQ2_M-00001-of-00002.gguf": b"GGUF 1",
        "IQ2_M/types-IQ2_M-00002-of-00002.gguf": b"GGUF 2",
        "mmproj-types-F16.gguf": b"GGUF eye",
    },
    "owner/folder": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "modules.json": b"[]",
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"dense",
        "2_Dense/pytorch_model.bin": b"dense",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        ).encode(),
        "model-1.safetensors": b"one",
        "model-2.safetensors": b"two",
        "consolidated.safetensors": b"one and two",
        "original/consolidated.00.pth": b"Meta's",
        "README.md": b"read me",
    },
    "owner/eyes-GGUF": {
        "eyes-Q8_0.gguf": b"GGUF eight",
        "BF16/eyes-BF16-00001-of-00002.gguf": b"GGUF 1",
        "BF16/eyes-BF16-00002-of-00002.gguf": b"GGUF 2",
        "mmproj-BF16.gguf": b"GGUF bf16",
        "mmproj-F16.gguf": b"GGUF f16",
        "mmproj-Q8_0.gguf": b"GGUF q8",
    },
    "owner/images": {"unet.bin": b"x", "README.md": b"x"},
    "owner/rwkv6-GGUF": {"rwkv6-Q8_0.gguf": b"GGUF m"},
    "owner/gated": {"x-Q8_0.gguf": b"GGUF g"},
}
GIB = 2**30
SIZES = {"types-Q8_0.gguf": 8 * GIB, "types-Q4_K_M.gguf": 4 * GIB, "types-F16.gguf": 16 * GIB}
SIZES |= dict.fromkeys(("model-1.safetensors", "model-2.safetensors"), GIB)


class Hub(BaseHTTPRequestHandler):
    """What a download asks: of a repository what there is, and a file; of an owner, what else."""

    requests: list[str] = []  # noqa: RUF012  (one server at a time; the fixture empties it)

    ranges: list[str] = []  # noqa: RUF012  (of requests for files)
    cut_at = 0  # bytes of a file's answer after which the connection breaks; 0: never
    knows_ranges = True

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was interrupted
            super().handle()

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        self.answer()

    def answer(self) -> None:
        if self.path.startswith("/api/models?"):
            self.reply([{"id": name} for name in REPOS if "author=owner" in self.path])
        elif self.path.startswith("/api/models/"):
            repo, _, rest = self.path.removeprefix("/api/models/").partition("?")
            repo, _, revision = repo.partition("/revision/")
            if self.found(repo, revision or "main"):
                files = [
                    {"rfilename": name, "size": SIZES.get(name, len(REPOS[repo][name]))}
                    for name in REPOS[repo]
                ]
                arch = "rwkv6" if "rwkv6" in repo else "llama"
                about = {"id": repo, "sha": COMMIT, "siblings": files if "blobs" in rest else []}
                self.reply({**about, "gguf": {"architecture": arch}})
        else:
            repo, _, rest = self.path.removeprefix("/").partition("/resolve/")
            revision, _, path = rest.partition("/")
            if self.found(repo, revision, path) and self.allowed(repo):
                self.send_file(REPOS[repo][path])

    def allowed(self, repo: str) -> bool:
        if "Authorization" in self.headers:
            self.refuse(401, X_Error_Message="Invalid credentials in Authorization header")
        elif "gated" in repo:
            self.refuse(403, X_Error_Code="GatedRepo")
        else:
            return True
        return False

    def found(self, repo: str, revision: str, path: str | None = None) -> bool:
        if repo not in REPOS:
            self.refuse(404, X_Error_Code="RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.refuse(404, X_Error_Code="RevisionNotFound")
        elif path is not None and path not in REPOS[repo]:
            self.refuse(404, X_Error_Code="EntryNotFound")
        else:
            return True
        return False

    def refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, body: bytes) -> None:
        """Answer with a file, or with the range of it that is asked for."""
        wanted = self.headers.get("Range", "")
        if self.command == "GET":
            self.ranges.append(wanted)
        at = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if not self.knows_ranges:
            at = 0
        self.send_response(206 if at else 200)
        self.send_header("Content-Length", str(len(body) - at))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            end = at + self.cut_at if self.cut_at else len(body)
            self.wfile.write(body[at:end])
            self.close_connection = end < len(body)

    def reply(self, answer: object) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
