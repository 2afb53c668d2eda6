"""``treadle convert``: a checkpoint of any kind as one mappable GGUF file."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from treadle.base.humanize import n_bytes
from treadle.cli.load import find_model
from treadle.cli.options import ModelType, as_usage, refuse_options
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json, printable, remark
from treadle.errors import FileError, UnsupportedError
from treadle.files.splits import is_hf
from treadle.files.target import check_not_read, check_target, files_of

if TYPE_CHECKING:
    from treadle.convert.recipe import Options as OptionsOf
    from treadle.convert.sources.source import Source
    from treadle.formats import Format

ADAPTER = "adapter_config.json"  # in PEFT's folders
OF_MODELS = (
    *("align", "split_max_size", "tokenizer", "settings", "resume", "allow_nonfinite"),
    *("mmproj", "no_mmproj", "draft_for", "mtp"),
)
TOKENIZER = ("tokenizer.ggml.model", "tokenizer.ggml.tokens")  # keys that every text model has
PLAIN = ("F32", "F16", "BF16")  # formats of a projector's matrices
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}  # as llama.cpp's gguf-split counts


def alignment(text: str) -> int:
    """Parse an alignment in bytes: a power of two, or ``page`` for this machine's page size. Raises
    click.BadParameter for anything else.
    """
    if text == "page":
        return mmap.PAGESIZE
    n = int(text) if text.isdecimal() else 0
    if n < 1 or n & (n - 1) or n >= 1 << 31:
        raise click.BadParameter(f"'{text}' is neither a power of two nor 'page'")
    return n


def size(text: str) -> int:
    """Parse a number of bytes, such as ``500M`` or ``2G``: K, M and G are powers of 1000. Raises
    click.BadParameter for anything else.
    """
    match = re.fullmatch(r"(\d{1,15})([KMG]?)", text.upper())
    if match is None or not int(match[1]):
        raise click.BadParameter(f"'{text}' is not a size, such as 500M or 2G")
    return int(match[1]) * UNITS[match[2]]


@click.command()
@click.argument("src", type=ModelType())
@click.argument("dst", type=click.Path(readable=False))
@click.option(
    "--type",
    "fmt",
    metavar="TYPE",
    help="Format of the matrices, such as F16 or Q8_0; as in SRC by default. Vectors become F32.",
)
@click.option(
    "--align",
    type=alignment,
    default="32",
    metavar="BYTES",
    help="Alignment of tensors: bytes, or 'page'.  [32]",
)
@click.option(
    "--split-max-size",
    type=size,
    help="Write shards of at most this size, such as 2G.",
)
@click.option(
    "--tokenizer",
    type=click.Path(readable=False),
    metavar="FILE",
    help="For checkpoints without one: tokenizer.model or tokenizer.bin.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of the metadata, such as llama.context_length=4096; may be repeated.",
)
@click.option(
    "--mmproj",
    type=click.Path(readable=False),
    metavar="FILE",
    help="The projector's file, if the model reads pictures or sound.  [mmproj-DST beside DST]",
)
@click.option("--no-mmproj", is_flag=True, help="Write no projector.")
@click.option(
    "--base",
    type=click.Path(readable=False),
    metavar="MODEL",
    help="Base model of an adapter (a PEFT folder).",
)
@click.option(
    "--draft-for",
    type=ModelType(),
    metavar="MODEL",
    help="The model of an EAGLE 3 or DFlash drafter, whose vocabulary the file gets.",
)
@click.option(
    "--mtp",
    is_flag=True,
    help="Write the layers for multi-token prediction (MTP) alone, a file for --draft.",
)
@click.option("--force", is_flag=True, help="Replace DST if it exists.")
@click.option(
    "--resume/--no-resume",
    default=True,
    help="Continue an interrupted conversion.  [resume]",
)
@click.option("--allow-nonfinite", is_flag=True, help="Accept infinite and NaN weights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    src: str,
    dst: str,
    fmt: str | None,
    align: int,
    split_max_size: int | None,
    tokenizer: str | None,
    settings: tuple[str, ...],
    mmproj: str | None,
    no_mmproj: bool,
    base: str | None,
    draft_for: str | None,
    mtp: bool,
    force: bool,
    resume: bool,
    allow_nonfinite: bool,
    as_json: bool,
) -> None:
    """Convert the checkpoint SRC to the GGUF file DST.

    The format of SRC is detected: a Hugging Face folder, Meta's folder of .pth shards, a llama2.c
    checkpoint, a GGML, GGMF or GGJT file, or GGUF of any version (shards are joined). A PEFT
    adapter folder becomes a GGUF adapter. hf:OWNER/REPO is downloaded.

    The picture and sound parts of a Hugging Face folder become a second file, the projector. Its
    matrices are F16, or F32 or BF16 if --type is; `treadle quantize` makes it smaller.
    """
    if mmproj is not None and (no_mmproj or not mmproj):
        what = "--mmproj is empty" if not mmproj else "--mmproj and --no-mmproj exclude each other"
        raise click.UsageError(what)
    if mtp and mmproj is not None:
        raise click.UsageError("--mtp and --mmproj exclude each other")
    for text in settings:
        if text.find("=") < 1:
            raise click.UsageError(f"--set {text!r:.80}: expected KEY=VALUE")
    from treadle.convert.recipe import Options
    from treadle.formats import by_name

    with as_usage(UnsupportedError):
        options = Options(
            None if fmt is None else by_name(fmt),
            align,
            split_max_size or 0,
            force,
            resume,
            allow_nonfinite,
            settings,
        )

    if not src or not dst:
        raise click.UsageError(f"{'SRC' if not src else 'DST'} is empty")
    target = Path(dst).expanduser()
    if not target.parent.is_dir():
        raise FileError("no such folder", path=target.parent)
    path = checkpoint(src)
    if (path / ADAPTER).is_file() or is_inside(path):
        if base is None:
            raise click.UsageError(f"{path} is an adapter: name its base model with --base MODEL")
        refuse_options(click.get_current_context(), OF_MODELS, "cannot be used with adapters")
        return show_written(path, "an adapter", [adapted(path, base, target, options)], as_json)
    if base is not None:
        raise click.UsageError(f"--base: {path} is not a folder with {ADAPTER}")
    beside = None
    if not (no_mmproj or mtp):
        beside = Path(mmproj).expanduser() if mmproj else target.with_name(f"mmproj-{target.name}")
    kind, written, remarks = write_files(
        path,
        target,
        options,
        tokenizer=None if tokenizer is None else Path(tokenizer).expanduser(),
        projector=beside,
        asked=mmproj is not None,
        draft_for=draft_for,
        mtp=mtp,
    )
    return show_written(path, kind, written, as_json, remarks)


def write_files(
    path: Path,
    target: Path,
    options: OptionsOf,
    *,
    tokenizer: Path | None,
    projector: Path | None,
    asked: bool,
    draft_for: str | None = None,
    mtp: bool = False,
) -> tuple[str, list[Path], list[str]]:
    """Write the checkpoint at ``path`` as ``target`` with the conversion's ``options``, and its
    picture and sound parts as the file ``projector``, None for no such file. ``tokenizer``: its
    file, for checkpoints without one. ``asked``: the user named the projector's file, so that a
    checkpoint without these parts is an error. ``draft_for``: the model whose vocabulary a drafter
    gets. ``mtp``: write the MTP layers alone. Return the checkpoint's kind, the paths written, and
    remarks.
    """
    from treadle.convert.detect import find_kind, open_source
    from treadle.convert.page_cache import record_page_cache
    from treadle.convert.recipe import notes
    from treadle.convert.sources.source import PARTS_LEFT_OUT
    from treadle.convert.writer import STAGE, convert

    with ExitStack() as stack:
        cache = stack.enter_context(closing(record_page_cache(path)))
        kind = find_kind(path)
        parts = None
        if projector is not None:
            parts = open_parts(path, options.type, asked=asked)
        if parts is not None and projector is not None:
            stack.enter_context(closing(parts))
            if projector.resolve() == target.resolve():
                raise click.UsageError("--mmproj is also DST: choose another name")
            read = {part.path for t in parts.tensors.values() for part in t.ranges}
            check_target(projector, [*read, *files_of(tokenizer)], force=options.force)
        opened = open_mtp(path) if mtp else open_source(path, tokenizer)
        source = stack.enter_context(closing(opened))
        check_not_read(target, files_of(tokenizer))
        if draft_for is not None:
            from treadle.convert.open import open_model
            from treadle.convert.sources.draft_for import add_model

            model = stack.enter_context(closing(open_model(find_model(draft_for))))
            check_not_read(target, model.paths)
            add_model(source, model)
        remarks = notes(source, options)
        if parts is not None:
            remarks = [note for note in remarks if not note.startswith(PARTS_LEFT_OUT)]
            remarks += parts.notes
        for note in remarks:
            remark(note)
        if not source.verbatim and source.metadata.keys().isdisjoint(TOKENIZER):
            remark(f"{path} has no supported tokenizer: {target} will accept token ids only")
        with ProgressBar(STAGE, "B") as meter:
            written = convert(source, target, options, progress=meter, say=remark, cache=cache)
            if parts is not None and projector is not None:
                own = replace(options, type=None, split_max=0, settings=())
                written += convert(parts, projector, own, progress=meter, say=remark)
    return kind.name, written, remarks


def open_mtp(path: Path) -> Source:
    """Open the MTP layers of a Hugging Face folder. Raises UnsupportedError for any other path, and
    for a folder without such layers.
    """
    from treadle.convert.hf.folder import open_hf_source

    if not is_hf(path):
        raise UnsupportedError(f"{path}: --mtp: expected a Hugging Face folder")
    return open_hf_source(path, mtp=True)


def open_parts(path: Path, wanted: Format | None, *, asked: bool) -> Source | None:
    """Open the picture and sound parts of a Hugging Face folder; None if it has none that treadle
    supports.

    ``wanted``: the format of the model's matrices, which the projector gets if it is F32, F16 or
    BF16; else F16. ``asked``: the user named the projector's file; then it is an error if there are
    no such parts.
    """
    from treadle.formats import by_name
    from treadle.media.hf_projector import is_media_folder
    from treadle.media.projector_source import open_projector_source

    if not is_hf(path) or not is_media_folder(path if path.is_dir() else path.parent):
        if asked:
            raise click.UsageError(f"--mmproj: {path} is not a folder with a picture or sound part")
        return None
    plain = wanted if wanted is not None and wanted.name in PLAIN else by_name("F16")
    try:
        return open_projector_source(path, plain)
    except (FileError, UnsupportedError) as error:
        if asked:
            raise
        remark(f"no projector is written: {error}")
        return None


def checkpoint(src: str) -> Path:
    """Return the path of SRC. ``hf:`` names are downloaded even if the model exceeds memory,
    because conversion reads it in strips.
    """
    if not src.startswith("hf:"):
        return Path(src).expanduser()
    with ProgressBar() as meter:
        return find_model(src, meter, to_run=False)


def is_inside(path: Path) -> bool:
    """Return whether ``path`` does not exist and names a task's adapter within a model's folder."""
    if path.exists():
        return False
    from treadle.convert.lora.tasks import is_task

    return is_task(path)


def adapted(folder: Path, base: str, target: Path, options: OptionsOf) -> Path:
    """Convert the PEFT adapter in ``folder``, made for the model ``base``, to the GGUF file
    ``target``, in the format and with the ``force`` of ``options``; return ``target``.
    """
    from treadle.convert.lora.lora import write_adapter

    write_adapter(folder, find_model(base), target, options.type, force=options.force)
    return target


def show_written(
    path: Path, kind: str, written: list[Path], as_json: bool, remarks: Sequence[str] = ()
) -> None:
    """Print the files that were written for the checkpoint at ``path``, with their sizes. JSON also
    has the checkpoint's ``kind`` and ``remarks``.
    """
    sizes = [made.stat().st_size for made in written]
    if as_json:
        paths = [{"path": str(p), "n_bytes": n} for p, n in zip(written, sizes, strict=True)]
        print_json({"source": str(path), "kind": kind, "files": paths, "notes": list(remarks)})
    else:
        for made, size in zip(written, sizes, strict=True):
            print(f"{printable(str(made))}  {n_bytes(size)}")
