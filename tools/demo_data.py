"""The demo model's text: Python's library and free packages, split, tokenised, in streams."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import io
import math
import random
import re
import sysconfig
import textwrap
import tokenize
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<|begin|>"
EOS = "<|end|>"
# About 3 % of the text stays held out once near-duplicates are taken back.
CANDIDATE_SHARE = 0.05
# A held-out file may share this part of its telling lines with all training files together.
MAX_SHARED_LINES = 0.13
MEAN_CUT = 700
ENCODED_AT_ONCE = 20_000
# Characters of the texts most like the library that two kinds of stream read beside it.
WIDE = 110_000_000
LIKE = 32_000_000

# Tests, third-party code, and tables that programs wrote: little to learn about writing Python.
_SKIP_FOLDERS = {
    *("test", "tests", "idle_test", "site-packages", "encodings", "pydoc_data", "_bundled"),
    *("lib-dynload", "__pycache__"),
}
_SKIP_FILES = re.compile(r"_sysconfigdata.*|config-.*|html/entities\.py|pydoc_data/.*|this\.py")

# Packages that `make test` installs, all under licences that allow this (docs/demo-model.md).
PACKAGES = (
    *("anyio", "charset-normalizer", "click", "filelock", "fsspec", "hatchling", "httpx2"),
    *("huggingface_hub", "hypothesis", "idna", "jinja2", "llvmlite", "markdown-it-py", "mpmath"),
    *("mypy", "networkx", "numpy", "packaging", "pathspec", "pip", "prompt_toolkit", "pygments"),
    *("pytest", "PyYAML", "requests", "rich", "setuptools", "sortedcontainers", "sympy"),
    *("tokenizers", "tomlkit", "torch", "tqdm", "transformers", "typer", "urllib3"),
)
_SKIP_PACKAGE_FOLDERS = {
    *("tests", "test", "testing", "_vendor", "models", "_internal", "typeshed", "test-data"),
    *("benchmarks", "lexers", "styles", "caffe2", "onnx", "quantization", "ao", "_inductor"),
}
MAX_CHARACTERS = 200_000
MAX_LINE = 400
MAX_LEAKED = 3  # telling lines that a training document may share with all held-out files
MAX_REPEATED = 0.3  # the share of a document's telling lines that earlier ones may have
_WORD = re.compile(r"\w+|[^\w\s]+")
_ANYBODYS = re.compile(
    r"(from|import|def __|raise |except |return |class \w+\(object\)|if __name__)"
)


@dataclass(frozen=True)
class Document:
    """One source file: its path below the library's root, with forward slashes, and its text."""

    path: str
    text: str


def read_library(root: Path | None = None) -> list[Document]:
    """Every Python source of the standard library worth learning from, sorted by path."""
    root = root or Path(sysconfig.get_path("stdlib"))
    documents = []
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        parts = path.split("/")
        if _SKIP_FOLDERS.intersection(parts) or _SKIP_FILES.match(path):
            continue
        text = _source(file.read_bytes())
        if len(text) > 80:
            documents.append(Document(path, text))
    return documents


def _source(data: bytes) -> str:
    """A program's text without form feeds and tabs; "" for what is none."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError):
        return ""
    return text.replace("\f", "").expandtabs(8)


def read_tests(root: Path | None = None) -> list[Document]:
    """The standard library's own tests: the same names and habits, far more of them."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(root.glob("test/**/*.py"), key=lambda file: file.relative_to(root).as_posix())
    named = ((file.relative_to(root).as_posix(), file.read_bytes()) for file in files)
    return list(_prose(named))


def read_packages() -> tuple[list[Document], dict[str, str]]:
    """Sources of the installed PACKAGES, sorted by path, and each package's version."""
    documents = []
    versions = {}
    for name in sorted(PACKAGES):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as e:
            raise SystemExit(f"{name} is not installed: it comes with `make test`") from e
        versions[name] = distribution.version
        listed = sorted(distribution.files or (), key=lambda file: file.as_posix())
        wanted = [file for file in listed if file.suffix == ".py" and not _skipped(file.parts)]
        documents += _prose((file.as_posix(), file.read_binary()) for file in wanted)
    return documents, versions


def read_wheels(folder: Path) -> tuple[list[Document], dict[str, str]]:
    """Sources inside a folder's wheels, sorted by wheel and path, and each package's version."""
    documents = []
    versions = {}
    for file in sorted(folder.glob("*.whl")):
        name, version = file.name.split("-")[:2]
        versions[name] = version
        with zipfile.ZipFile(file) as wheel:
            paths = [PurePosixPath(path) for path in sorted(wheel.namelist())]
            wanted = [path for path in paths if path.suffix == ".py" and not _skipped(path.parts)]
            documents += _prose((path.as_posix(), wheel.read(path.as_posix())) for path in wanted)
    return documents, versions


def _skipped(parts: Sequence[str]) -> bool:
    return bool(_SKIP_PACKAGE_FOLDERS.intersection(parts)) or ".." in parts


def _prose(files: Iterable[tuple[str, bytes]]) -> Iterator[Document]:
    """Files that people wrote: no tables, nothing minified, nothing huge."""
    for path, data in files:
        text = _source(data)
        lines = text.splitlines()
        if not 200 < len(text) < MAX_CHARACTERS or max(map(len, lines)) > MAX_LINE:
            continue
        digits = sum(map(str.isdigit, text)) / len(text)
        foreign = sum(ord(c) > 127 for c in text) / len(text)
        if digits < 0.08 and foreign < 0.02:
            yield Document(path, text)


def distinct(documents: Sequence[Document], held_out: Sequence[Document]) -> list[Document]:
    """The documents, less those that repeat lines of earlier ones, or any of a held-out file."""
    hidden = {line for document in held_out for line in _telling_lines(document.text)}
    hidden = {line for line in hidden if not _ANYBODYS.match(line)}
    seen: set[str] = set()
    out = []
    for document in documents:
        lines = set(_telling_lines(document.text))
        repeated = len(lines & seen) > MAX_REPEATED * len(lines)
        if repeated or len(lines & hidden) > MAX_LEAKED:
            continue
        seen |= lines
        out.append(document)
    return out


def by_likeness(documents: Sequence[Document], library: Sequence[Document]) -> list[Document]:
    """The documents, those first whose words and marks are most like the library's.

    A document's mark is the mean over its words of log(share in the library / share in all
    documents): what picks text of one kind out of text of many (Moore and Lewis, 2010).
    """
    like, all_ = (_word_counts(part) for part in (library, documents))
    n_like = like.total()
    n_all = all_.total()
    weight = {
        word: math.log((like[word] + 1) / n_like) - math.log((count + 1) / n_all)
        for word, count in all_.items()
    }

    def mark(document: Document) -> float:
        words = _WORD.findall(document.text)
        return sum(weight[word] for word in words) / max(1, len(words))

    return sorted(documents, key=mark, reverse=True)


def _word_counts(documents: Sequence[Document]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(_WORD.findall(document.text))
    return counts


def fingerprint(documents: Sequence[Document]) -> str:
    """A hash of all paths and texts: it says which library a model was trained on."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.path}\0{document.text}\0".encode())
    return digest.hexdigest()[:16]


def split(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents.

    The choice is by a hash of the path alone. A candidate that repeats lines of the training files
    (posixpath beside ntpath, say) would flatter the perplexity: it goes back to the training files.
    """
    limit = int(CANDIDATE_SHARE * 2**32)
    held: list[Document] = []
    train: list[Document] = []
    for document in documents:
        mark = int.from_bytes(hashlib.sha256(document.path.encode()).digest()[:4], "big")
        (held if mark < limit else train).append(document)
    seen: Counter[str] = Counter()
    for document in train:
        seen.update(set(_telling_lines(document.text)))
    clean: list[Document] = []
    for document in held:
        lines = _telling_lines(document.text)
        shared = sum(seen[line] > 0 for line in lines)
        # A short file proves nothing and measures nothing.
        fresh = len(lines) >= 10 and shared <= MAX_SHARED_LINES * len(lines)
        (clean if fresh else train).append(document)
    return sorted(train, key=lambda document: document.path), clean


def _telling_lines(text: str) -> list[str]:
    """Lines long enough that two files do not share them by chance."""
    return [line for raw in text.splitlines() if len(line := raw.strip()) > 24]


def train_tokenizer(documents: Sequence[Document], n_vocab: int) -> Tokenizer:
    """A byte-level BPE with GPT-2's pre-tokeniser: a line break and its indentation stay together.

    Its pattern splits "\\n        return" into the break with seven spaces and " return", so the
    commonest indentations become single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=n_vocab,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    if tokenizer.get_vocab_size() != n_vocab:
        raise ValueError(f"{tokenizer.get_vocab_size()} pieces where {n_vocab} were asked for")
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a whole text after its BOS."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return [id_of(tokenizer, BOS), *ids]


def id_of(tokenizer: Tokenizer, piece: str) -> int:
    """The id of a piece that must exist; KeyError when it does not."""
    id = tokenizer.token_to_id(piece)
    if id is None:
        raise KeyError(piece)
    return int(id)


@dataclass(frozen=True)
class Sources:
    """Training documents by where they come from."""

    library: list[Document]
    tests: list[Document] = field(default_factory=list)
    packages: list[Document] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_this_environment(
        cls,
        library: Sequence[Document],
        held_out: Sequence[Document],
        wheels: Path | None = None,
    ) -> Sources:
        """The library's training documents, its tests and packages, near-duplicates left out.

        The packages are the installed PACKAGES, and those of a folder of wheels.
        """
        tests = read_tests()
        packages, versions = read_packages()
        if wheels is not None:
            more, more_versions = read_wheels(wheels)
            packages = [*packages, *more]
            versions = {**versions, **more_versions}
        kept = {id(d) for d in distinct([*library, *tests, *packages], held_out)}
        parts = ([d for d in part if id(d) in kept] for part in (library, tests, packages))
        return cls(*parts, versions)

    @property
    def everything(self) -> list[Document]:
        return [*self.library, *self.tests, *self.packages]

    def stream(self, name: str, tokenizer: Tokenizer, seed: int) -> npt.NDArray[np.uint16]:
        """One pass: the library alone, all texts, or mostly library and functions at the end.

        "wide" and "like" read the library once beside the half and the eighth of all other texts
        that are most like it.
        """
        if name == "library":
            return make_stream(self.library, tokenizer, seed)
        rng = random.Random(seed)
        others = [*self.tests, *self.packages]
        if name in ("wide", "like"):
            others = by_likeness(others, self.library)
            others = _up_to(others, WIDE if name == "wide" else LIKE)
            return make_stream([*self.library, *others], tokenizer, seed, parts=0.5)
        if name == "finish":
            others = rng.sample(others, len(others) // 4)
        documents = [*self.library, *self.library, *others]
        return make_stream(documents, tokenizer, seed, parts=0.8)


def make_stream(
    documents: Sequence[Document], tokenizer: Tokenizer, seed: int, parts: float = 0.4
) -> npt.NDArray[np.uint16]:
    """All documents once, in an order of their own for each seed: BOS, text, EOS, BOS, ...

    Three things vary with the seed, so that an epoch never repeats the last one exactly: some
    files begin after their docstring; some functions and classes stand again as documents of
    their own, as a prompt "def f(n):" does; and the text is cut here and there before it is
    tokenised, for a prompt may end inside what would have been one token.
    """
    rng = random.Random(seed)
    texts = []
    for document in documents:
        head, pieces = _outline(document.text)
        texts.append(document.text[head:] if rng.random() < 0.3 else document.text)
        texts.extend(piece for piece in pieces if rng.random() < parts)
    rng.shuffle(texts)
    segments = [list(_cuts(text, rng)) for text in texts]
    flat = [segment for group in segments for segment in group]
    encoded = _encoded(tokenizer, flat)
    begin = id_of(tokenizer, BOS)
    end = id_of(tokenizer, EOS)
    stream = array("H")
    for group in segments:
        stream.append(begin)
        for _ in group:
            stream.extend(next(encoded))
        stream.append(end)
    return np.array(stream, dtype=np.uint16)


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> Iterator[list[int]]:
    """The ids of each text; some at a time, for encodings hold far more than ids."""
    for start in range(0, len(texts), ENCODED_AT_ONCE):
        batch = texts[start : start + ENCODED_AT_ONCE]
        for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
            yield encoding.ids


def _up_to(documents: Sequence[Document], n_characters: int) -> list[Document]:
    """The first documents that make up a number of characters."""
    total = np.cumsum([len(document.text) for document in documents])
    return list(documents[: int(np.searchsorted(total, n_characters))])


def _cuts(text: str, rng: random.Random) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + 1 + int(rng.expovariate(1 / MEAN_CUT))
        yield text[start:stop]
        start = stop


def _outline(text: str) -> tuple[int, list[str]]:
    """Where the code begins after the module's docstring, and its functions and classes."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return 0, []
    lines = text.splitlines(keepends=True)
    starts = np.cumsum([0, *(len(line) for line in lines)])
    head = 0
    if len(body) > 1 and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        head = int(starts[body[1].lineno - 1])
    parts = []
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            parts.append("".join(lines[node.lineno - 1 : node.end_lineno]))
            if isinstance(node, ast.ClassDef):
                parts.extend(_methods(node, lines))
    return head, [part for part in parts if len(part) > 80]


def _methods(node: ast.ClassDef, lines: list[str]) -> Iterator[str]:
    """Every fourth method of a class, moved to the left margin."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    for method in methods[::4]:
        yield textwrap.dedent("".join(lines[method.lineno - 1 : method.end_lineno]))
