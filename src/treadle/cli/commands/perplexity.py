"""``treadle perplexity``: how well a model predicts a text, alone or against a reference."""

from __future__ import annotations

import dataclasses
import time
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import click

from treadle.base.validate import file_name
from treadle.cli.load import load_model, read_text
from treadle.cli.options import DEVICE, LORA, THREADS, ModelType, kv_options
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import heading, print_table, show
from treadle.errors import TreadleError
from treadle.files.target import check_target, files_of

if TYPE_CHECKING:
    from treadle.api.model import Model
    from treadle.evaluate import Reference, Scores, Summary, TokenWindows

DEFAULT_CONTEXT = 512  # tokens, as in published numbers
STAGE = "perplexity"


@click.command()
@click.argument("model", type=ModelType())
@click.argument("file", type=click.Path(readable=False), required=False)
@click.option(
    "--kl-from",
    "reference",
    metavar="REF",
    type=click.Path(readable=False),
    help="KL divergence from the predictions of this model, or from saved ones.",
)
@click.option(
    "-c",
    "--context",
    type=click.IntRange(4),
    metavar="N",
    help=f"Tokens per window.  [default: {DEFAULT_CONTEXT}]",
)
@click.option("--chunks", type=click.IntRange(1), metavar="N", help="Stop after N windows.")
@click.option(
    "--stride",
    type=click.IntRange(1),
    metavar="N",
    help="Windows N tokens apart, of which the last N tokens are scored.",
)
@click.option(
    "--save-logits",
    "save",
    metavar="FILE",
    type=click.Path(readable=False),
    help="Save the logits, for --kl-from.",
)
@click.option("--force", is_flag=True, help="Replace the file of --save-logits if it exists.")
@click.option(
    "--as-written",
    is_flag=True,
    help="Run the scored tokens one by one, as in generation: slower, and with other kernels.",
)
@THREADS
@kv_options
@LORA
@DEVICE
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str,
    file: str | None,
    reference: str | None,
    context: int | None,
    chunks: int | None,
    stride: int | None,
    save: str | None,
    force: bool,
    as_written: bool,
    threads: int | None,
    kv: str | None,
    lora: tuple[tuple[str, float], ...],
    device: str | None,
    as_json: bool,
) -> None:
    """Print the perplexity of MODEL on the text FILE ("-": standard input).

    The text is cut into windows; the second half of each is scored. With --kl-from, also print the
    KL divergence from the reference's predictions. Saved predictions contain their text: leave out
    FILE. Adapters (--lora), the KV cache type (--kv), the device and --as-written apply to MODEL
    only.
    """
    from treadle.evaluate import SavedLogits, is_saved

    saved = SavedLogits(reference) if reference and is_saved(reference) else None
    check_usage(file, reference, saved is not None, stride, save, context)
    if force and save is None:
        raise click.UsageError("--force needs --save-logits")
    if save is not None:
        read = files_of(model, reference, file, *(path for path, _ in lora))
        check_target(file_name(save), read, force=force)
    n_ctx = context or (saved.windows.n_ctx if saved else DEFAULT_CONTEXT)
    with ExitStack() as stack:
        meter = stack.enter_context(ProgressBar(STAGE, "tok"))
        own = {"kv": kv, "lora": lora, "device": device}
        loaded = open_model(model, n_ctx, threads, meter, stack, **own)
        other = None
        if reference is not None and saved is None:
            other = open_model(reference, n_ctx, threads, meter, stack)
        windows = windows_of(loaded, other, saved, file, n_ctx, stride or 0, chunks)
        began = time.perf_counter()
        result = run(loaded, other, saved, windows, save, meter, as_written)
        seconds = time.perf_counter() - began
    report = describe(loaded, file, reference, windows, stride, result.summary(), seconds)
    report["as_written"] = as_written
    show(report, as_json, print_report)


def check_usage(
    file: str | None,
    reference: str | None,
    saved: bool,
    stride: int | None,
    save: str | None,
    context: int | None,
) -> None:
    """Raise click.UsageError for options that exclude each other, and for a missing FILE.
    ``reference``: the value of ``--kl-from``; ``saved``: it is a file of saved predictions;
    ``save``: the value of ``--save-logits``.
    """
    if file is None and not saved:
        why = f": {reference} has no saved predictions, so FILE is required" if reference else ""
        raise click.UsageError(f"Missing argument 'FILE'{why}")
    if saved and (stride or context or file):
        raise click.UsageError(
            "saved predictions contain their text and windows: leave out FILE, -c and --stride"
        )
    if save and (stride or saved):
        raise click.UsageError("--save-logits excludes --stride, and saved --kl-from predictions")


def open_model(
    ref: str, n_ctx: int, threads: int | None, meter: ProgressBar, stack: ExitStack, **settings: Any
) -> Model:
    """Load the model ``ref``, closed by ``stack``, with a KV cache for as many windows of ``n_ctx``
    tokens as run at once. ``settings``: further keyword arguments of ``load_model``.
    """
    from treadle.evaluate import N_SEQUENCES

    return stack.enter_context(
        load_model(ref, meter, threads=threads, context=n_ctx, n_sequences=N_SEQUENCES, **settings)
    )


def windows_of(
    model: Model,
    other: Model | None,
    saved: Any,
    file: str | None,
    n_ctx: int,
    stride: int,
    chunks: int | None,
) -> TokenWindows:
    """Return the windows of the saved predictions, or without any (``saved`` None) cut the text
    FILE into windows of ``n_ctx`` tokens, ``stride`` apart; at most ``chunks``. Raises TreadleError
    if ``model`` and the reference ``other`` tokenize the text differently.
    """
    from treadle.evaluate import cut

    tokenizer = model.tokenizer
    if saved is not None:
        found: TokenWindows = saved.windows
        kept = found.tokens[:chunks]
        return dataclasses.replace(found, tokens=kept, bos=bos_of(tokenizer))
    assert file is not None
    text = read_text(file)
    ids = model.tokenize(text, special=False)
    if other is not None and other.tokenize(text, special=False) != ids:
        raise TreadleError(
            f"{other.path} and {model.path} tokenize the text differently: their predictions "
            "cannot be compared"
        )
    return cut(ids, n_ctx, bos=bos_of(tokenizer), stride=stride, n_windows=chunks)


def bos_of(tokenizer: Any) -> int | None:
    """Return the id of the BOS token if every text of the model begins with it, else None."""
    return tokenizer.bos if tokenizer.add_bos else None


def run(
    model: Model,
    other: Model | None,
    saved: Any,
    windows: TokenWindows,
    save: str | None,
    meter: ProgressBar,
    as_written: bool,
) -> Scores:
    """Score the windows: perplexity and, with the reference ``other`` or ``saved`` predictions,
    divergence from it. ``save``: file to which the logits are written, or None. ``as_written``: run
    the scored tokens one by one.
    """
    from treadle.evaluate import ReferenceModel, measure, save_logits

    against: Reference | None = saved if other is None else ReferenceModel(other.engine, windows)

    def progress(done: int, total: int, so_far: Scores) -> None:
        if meter.enabled and so_far.nll:
            meter.note = f"perplexity {so_far.perplexity:.4f}"
        meter(STAGE, done, total)

    saving = save_logits(save, windows, model.config.n_vocab) if save else nullcontext()
    with saving as append:
        return measure(
            model.engine,
            windows,
            against=against,
            save=append,
            progress=progress,
            as_written=as_written,
        )


def describe(
    model: Model,
    file: str | None,
    reference: str | None,
    windows: TokenWindows,
    stride: int | None,
    summary: Summary,
    seconds: float,
) -> dict[str, Any]:
    """Return the report, as JSON has it: model, settings (``file`` to ``stride``), speed (from
    ``seconds`` of running) and the results in ``summary``.
    """
    n_run = len(windows) * (windows.n_ctx - 1)
    report: dict[str, Any] = {
        "model": str(model.path),
        "file": file,
        "reference": reference,
        "n_ctx": windows.n_ctx,
        "stride": stride,
        "n_windows": len(windows),
        "n_run": n_run,
        "seconds": seconds,
        "tok_s": n_run / seconds,
    }
    return report | dataclasses.asdict(summary)


def print_report(report: dict[str, Any]) -> None:
    """Print the report of ``describe`` as text."""
    heading(report["model"])
    print(
        f"{report['n']} tokens scored in {report['n_windows']} windows of {report['n_ctx']}, "
        f"{report['tok_s']:.0f} tokens/s" + ", token by token" * report["as_written"]
    )
    rows = [("perplexity", plus_minus(report["perplexity"], 4))]
    if report["reference"]:
        rows += [
            ("of the reference", plus_minus(report["base_perplexity"], 4)),
            ("ratio", plus_minus(report["ratio"], 5)),
            ("KL divergence, mean", plus_minus(report["kl"], 6)),
            ("median", f"{report['kl_median']:.6f}"),
            ("99th percentile", f"{report['kl_p99']:.6f}"),
            ("99.9th percentile", f"{report['kl_p999']:.6f}"),
            ("maximum", f"{report['kl_max']:.6f}"),
            ("same top token", plus_minus(report["top1"], 3, 100, " %")),
            ("Δp of the true token, mean", plus_minus(report["delta_p"], 3, 100, " %")),
            ("root mean square", f"{100 * report['delta_p_rms']:.3f} %"),
        ]
    print_table(["", "value ± standard error"], rows)


def plus_minus(estimate: dict[str, float], digits: int, scale: float = 1, unit: str = "") -> str:
    """Format ``value`` and ``error`` (standard error) of an estimate, multiplied by ``scale``, with
    ``digits`` decimals and ``unit`` behind them.
    """
    value = scale * estimate["value"]
    error = scale * estimate["error"]
    return f"{value:.{digits}f} ± {error:.{digits}f}{unit}"
