"""``treadle bench``: prefill and decode speed, compared with this machine's peaks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from statistics import median
from typing import Any

import click

from treadle.api.summary import bytes_by_type
from treadle.base.fast_classes import dataclass
from treadle.cli.bench_engines import (
    BenchEngine,
    LlamaCpp,
    Streams,
    Treadle,
    TreadleEncoder,
    streams,
)
from treadle.cli.bench_results import Result, print_results, warn_busy
from treadle.cli.load import device_name, find_model, find_projector, load_model
from treadle.cli.options import DEVICE, IMAGE_MAX_TOKENS, MMPROJ, ModelType, Picture, kv_options
from treadle.cli.projector import ImageSize, ImageSizeType, cost_of
from treadle.cli.speed import Parts, PassCost, Peaks, alike, measured_peaks
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_json
from treadle.errors import TreadleError
from treadle.files.splits import shown_name
from treadle.files.target import files_of

MIN_CPU_S = 0.02  # least seconds of all repetitions: waking the threads takes 0.1 ms of each


def int_list(n: int) -> Callable[[str], tuple[int, ...]]:
    """Return a parser of integers of at least ``n``, separated by commas. It drops duplicates, and
    raises click.BadParameter for anything else.
    """

    def numbers(text: str) -> tuple[int, ...]:
        try:
            found = tuple(dict.fromkeys(map(int, text.split(","))))  # without duplicates
        except ValueError:
            what = f"'{text}' is not a list of whole numbers, such as 1,2"
            raise click.BadParameter(what) from None
        if min(found) < n:
            raise click.BadParameter(f"{min(found)} is below the minimum, {n}")
        return found

    return numbers


@dataclass(frozen=True)
class Test:
    """One test: prefill of ``n`` tokens, or decode of ``n`` tokens by each of ``sequences``, after
    ``depth`` cached tokens.
    """

    kind: str  # "pp" or "tg"
    n: int  # tokens
    depth: int  # tokens already in the cache
    sequences: int = 1

    @property
    def name(self) -> str:
        """The name as in llama-bench: ``pp512``, ``tg128``."""
        return f"{self.kind}{self.n}"

    @property
    def n_tokens(self) -> int:
        """Tokens of all sequences together, from which tokens a second are computed."""
        return self.n * self.sequences

    def runs(self, at_once: int) -> Iterator[tuple[Parts, int]]:
        """Yield the engine's runs as (parts, number of logits rows); a part is (cached tokens, new
        tokens) of one sequence. Prefill is split into runs of ``at_once`` tokens, and only the last
        has a logits row.
        """
        if self.kind == "tg":
            for i in range(self.n):
                yield [(self.depth + i, 1)] * self.sequences, self.sequences
            return
        for done in range(0, self.n, at_once):
            n = min(at_once, self.n - done)
            yield [(self.depth + done, n)], int(done + n == self.n)


@dataclass(frozen=True)
class Schedule:
    """All tests of one call of the command. ``against``: also time llama.cpp. ``pictures``: sizes
    of pictures to encode.
    """

    tests: list[Test]
    repeat: int  # times that each test is timed
    kv: str | None  # type of the KV cache; None: the default
    against: bool
    device: str | None = None  # None: the default
    pictures: tuple[ImageSize, ...] = ()
    media: Mapping[str, Any] = field(default_factory=dict)  # settings of ``load`` for pictures

    @property
    def n_sequences(self) -> int:
        """The largest number of sequences in a test."""
        return max((test.sequences for test in self.tests), default=1)

    @property
    def context(self) -> int:
        """Tokens that a sequence must be able to hold."""
        return max((test.n + test.depth for test in self.tests), default=1)


@click.command()
@click.argument("models", metavar="MODEL...", nargs=-1, required=True, type=ModelType())
@click.option(
    "-p", "--prompt", "n_prompt", type=int_list(0), default="512", help="Prompt tokens to process."
)
@click.option("-n", "--gen", "n_gen", type=int_list(0), default="128", help="Tokens to generate.")
@click.option(
    "-d", "--depth", type=int_list(0), default="0", help="Tokens in the context before the test."
)
@click.option(
    "-s", "--sequences", type=int_list(1), default="1", help="Sequences that generate in one batch."
)
@click.option(
    "-t",
    "--threads",
    type=int_list(1),
    help="Number of threads; `treadle doctor` shows the default.",
)
@click.option("-r", "--repeat", type=click.IntRange(1), default=5, metavar="N", help="Repetitions.")
@kv_options
@DEVICE
@click.option(
    "--against",
    type=click.Choice([LlamaCpp.name]),
    help="Also benchmark another engine, in alternating runs.",
)
@click.option(
    "--plot",
    type=Picture(),
    metavar="FILE.svg",
    help="Draw a chart: roofline, speed by depth, speed by model file.",
)
@click.option(
    "--image",
    "pictures",
    metavar="WxH",
    type=ImageSizeType(),
    multiple=True,
    help="Also time the encoding of a random picture of this size, in pixels; may be repeated.",
)
@MMPROJ
@IMAGE_MAX_TOKENS
@click.option(
    "--sound",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Sound that speech models transcribe.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects.")
def command(
    models: tuple[str, ...],
    n_prompt: tuple[int, ...],
    n_gen: tuple[int, ...],
    depth: tuple[int, ...],
    sequences: tuple[int, ...],
    threads: tuple[int, ...] | None,
    repeat: int,
    kv: str | None,
    device: str | None,
    against: str | None,
    plot: Path | None,
    pictures: tuple[ImageSize, ...],
    mmproj: str | None,
    image_max_tokens: int | None,
    sound: Path | None,
    as_json: bool,
) -> None:
    """Benchmark each MODEL: tokens per second, median and spread, and the share of this machine's
    peaks.

    -p, -n, -d, -s and -t take several numbers, as in -t 1,2; 0 skips the test. ppN processes N
    prompt tokens at once, tgN generates N tokens one by one, without sampling. With --image, the
    time from a picture's pixels to the rows that the model reads is measured too. Of speech models
    it measures how many times faster than the sound they are, with -t and -r.
    """
    tests = [
        *(Test("pp", n, d) for d in depth for n in n_prompt if n),
        *(Test("tg", n, d, s) for d in depth for n in n_gen for s in sequences if n),
    ]
    if not tests and (plot or not pictures):
        raise click.UsageError("nothing to time: -p and -n are both 0")
    if (mmproj or image_max_tokens) and not pictures:
        raise click.UsageError("--mmproj and --image-max-tokens need --image WxH")
    if sequences != (1,) and not any(n_gen):
        raise click.UsageError("-s needs generation, but -n is 0")
    if time_speech(models, threads, repeat, device, sound, as_json):
        return
    tests.sort(key=lambda test: test.depth)  # each depth continues from the previous one's tokens
    media: dict[str, Any] = {"image_max_tokens": image_max_tokens} if pictures else {}
    against_it = against is not None
    schedule = Schedule(tests, repeat, kv, against_it, device, pictures, media)
    if plot:
        from treadle.cli.ui.svg import check_place

        check_place(plot, files_of(*models))
    results: list[Result] = []
    with ProgressBar() as progress:
        wanted = bool(pictures) and mmproj is None
        paths = [find_model(model, progress, projector=wanted) for model in models]
        if mmproj is not None:
            media["mmproj"] = find_projector(mmproj, progress)
        for path, name in zip(paths, names_of(paths), strict=True):
            for n_threads in threads or (None,):
                found = time_model(path, name, n_threads, schedule, progress)
                results += found
                record(path, found, kv)
    if as_json:
        print_json([asdict(result) for result in results])
    else:
        print_results(results)
    warn_busy(results)
    if plot:  # after the results: a full disk loses only the chart
        from treadle.cli.bench_plot import draw
        from treadle.cli.ui.svg import origin
        from treadle.files.target import write_text

        write_text(plot, draw([r for r in results if r.picture is None], origin([])))


def time_speech(
    models: Sequence[str],
    threads: Sequence[int] | None,
    repeat: int,
    device: str | None,
    sound: Path | None,
    as_json: bool,
) -> bool:
    """If all MODELs are speech models, benchmark them and print the results; return whether they
    are. Raises click.UsageError if only some are, and for a ``sound`` file if none is.
    """
    from treadle.cli.speech import is_speech_model

    with ProgressBar() as progress:
        paths = [find_model(model, progress) for model in models]
        n_speech = sum(map(is_speech_model, paths))
        if not n_speech and sound is not None:
            raise click.UsageError("--sound is for speech models")
        if not n_speech:
            return False
        if n_speech < len(paths):
            raise click.UsageError("speech models and others: benchmark them one after the other")
        from treadle.cli.bench_speech import bench_speech, print_speech

        counts = [*(threads or (None,))]
        results = bench_speech(paths, names_of(paths), counts, repeat, device, sound, progress)
    print_speech(results, as_json)
    return True


def record(path: Path, results: Sequence[Result], kv: str | None) -> None:
    """Store treadle's speeds of prefill and decode in the records of the model at ``path``;
    ``treadle list`` shows them. ``kv``: type of the KV cache, None for the default.
    """
    from treadle.catalog.records import add_speeds

    ours = [r for r in results if r.engine == Treadle.name and r.picture is None]
    add_speeds(path, [asdict(result) for result in ours], kv)


def names_of(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: that of its file or folder, or the path itself if two different
    paths have the same name.
    """
    unique = {shown_name(path) for path in paths}
    return [shown_name(path) if len(unique) == len(set(paths)) else str(path) for path in paths]


def time_model(
    path: Path, name: str, n_threads: int | None, schedule: Schedule, progress: ProgressBar
) -> list[Result]:
    """Run every test of ``schedule`` on one file with one number of threads (None: the default),
    and return the results of all engines, in which the model is called ``name``.
    """
    from treadle.api.model import OUTPUTS  # type: ignore[attr-defined]

    settings: dict[str, Any] = {"threads": n_threads, "kv": schedule.kv, "device": schedule.device}
    if schedule.n_sequences > 1:
        settings["n_sequences"] = schedule.n_sequences
    settings |= schedule.media
    model: Any = load_model(str(path), progress, room=schedule.context, **settings)
    results: list[Result] = []
    engines: list[BenchEngine] = []
    try:
        if model.config.main_output != "logits":
            how = "time its steps with `treadle plan MODEL -p 128 --profile`"
            raise TreadleError(f"{path}: the model does not generate text: {how}")
        most = min(model.engine.max_tokens, OUTPUTS)
        if schedule.n_sequences > most:
            raise click.UsageError(
                f"-s {schedule.n_sequences}: at most {most} sequences in one batch"
            )
        ids: Streams = streams(schedule.n_sequences, schedule.context, model.config.n_vocab)
        encodes = model.config.encoder is not None
        engines.append((TreadleEncoder if encodes else Treadle)(model, ids))
        if schedule.against and encodes:
            what = f"{path}: an encoder-decoder model: only treadle is benchmarked"
            raise click.UsageError(what)
        if schedule.against:
            peer = {"threads": model.n_threads, "context": schedule.context, "kv": schedule.kv}
            engines.append(LlamaCpp(path, ids, **peer))
        for test in schedule.tests:
            timed = time_in_turns(model, engines, test, schedule.repeat, progress)
            results += evaluate(model, name, engines, test, timed)
        for size in schedule.pictures:
            results.append(time_picture(model, name, size, schedule, progress))
    finally:
        for engine in engines:
            engine.close()
        model.close()
    return results


def time_picture(
    model: Any, name: str, size: ImageSize, schedule: Schedule, progress: ProgressBar
) -> Result:
    """Time the encoding of a random picture of ``size``, from the prepared (resized) picture to the
    rows that the model reads. ``name``: the model's name in the result.
    """
    from treadle.cli.media_files import MediaFile, check_reads

    check_reads(model, [MediaFile("image", f"--image {size}")])
    projector = model.media.projector
    prepared = projector.prepare(size.pixels(), model.image_max_tokens)
    rates: list[Peaks] = []
    times: list[float] = []
    cpu_s = 0.0
    stage = f"timing a picture of {size}"
    for i in range(schedule.repeat + 1):  # the first one compiles kernels, and is not counted
        progress(stage, i, schedule.repeat + 1)
        began_s = time.perf_counter()
        began_cpu_s = time.process_time()
        projector.encode(prepared)
        if i:
            times.append(time.perf_counter() - began_s)
            cpu_s += time.process_time() - began_cpu_s
            rates.append(measured_peaks(model, None))
    progress(stage, schedule.repeat + 1, schedule.repeat + 1)
    peaks = alike(rates)
    usual = {name: median(each[name] for each in peaks) for name in peaks[0]}
    works = [PassCost.sum_of(cost_of(projector, prepared, each)) for each in peaks]
    work = PassCost.sum_of(cost_of(projector, prepared, usual))
    middle = median(times)
    device = device_name(model)
    return Result(
        test=f"image {size}",
        depth=0,
        threads=model.n_threads,
        sequences=1,
        tok_s=prepared.n_rows / middle,
        tok_s_min=prepared.n_rows / max(times),
        tok_s_max=prepared.n_rows / min(times),
        bytes_s=work.n_bytes / middle,
        ops_s=work.ops / middle,
        share_of_peak=median(map(PassCost.share_of_peak, works, times)),
        engine=Treadle.name,
        model=name,
        format=next(iter(bytes_by_type(model.gguf.tensors.values())), "none"),
        peak=work.bound,
        shares=work.shares(middle),
        peaks=usual,
        processor_time_share=None
        if device
        else BenchTimes([], [], cpu_s).share(times, model.n_threads),
        device=device,
        picture={
            "size": list(prepared.size),
            "resized": list(prepared.resized),
            "n_patches": sum(each.n_rows for each in prepared.inputs),
            "n_rows": prepared.n_rows,
            "seconds": middle,
        },
    )


@dataclass
class BenchTimes:
    """Times of the repetitions of one test."""

    seconds: list[list[float]]  # [n_engines][repeat]
    peaks: list[Peaks]  # of this machine right after each of treadle's, [repeat]
    cpu_s: float = 0.0  # processor time of all of treadle's repetitions and threads

    def share(self, seconds: Sequence[float], n_threads: int) -> float | None:
        """Return the processor time of ``cpu_s`` as a share of what ``n_threads`` could have used
        in ``seconds``, 0 to 1; None if the sum of ``seconds`` is too short to tell.
        """
        total_s = sum(seconds)
        return min(1.0, self.cpu_s / total_s / n_threads) if total_s >= MIN_CPU_S else None


def time_in_turns(
    model: Any, engines: Sequence[BenchEngine], test: Test, repeat: int, progress: ProgressBar
) -> BenchTimes:
    """Time ``test`` with every engine, ``repeat`` times.

    The engines alternate, so that a slow minute of a shared machine affects all of them. One extra
    repetition first warms caches and compiles missing kernels; it is not counted.
    """
    timed = BenchTimes([[] for _ in engines], [])
    for i in range(repeat + 1):
        progress(f"timing {test.name} at depth {test.depth}", i, repeat + 1)
        for engine, times in zip(engines, timed.seconds, strict=True):
            elapsed, cpu_s = time_once(engine, test)
            if i:
                times.append(elapsed)
            if i and engine.name == Treadle.name:
                timed.cpu_s += cpu_s
                timed.peaks.append(measured_peaks(model, None))  # bandwidth varies within seconds
    progress(f"timing {test.name} at depth {test.depth}", repeat + 1, repeat + 1)
    return timed


def time_once(engine: BenchEngine, test: Test) -> tuple[float, float]:
    """Return the seconds that ``test`` takes once: wall time, and processor time of all threads,
    spinning ones included. Its ``depth`` tokens are put into the cache first, untimed.
    """
    engine.set_depth(test.depth, test.sequences)
    start_s = time.perf_counter()
    start_cpu_s = time.process_time()
    if test.kind == "pp":
        engine.prefill(test.n)
    else:
        engine.decode(test.n, test.sequences)
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def evaluate(
    model: Any, name: str, engines: Sequence[BenchEngine], test: Test, timed: BenchTimes
) -> Iterator[Result]:
    """Yield a result for each of ``engines`` from the times ``timed`` of its repetitions of
    ``test``; ``name``: the model's name in it. Bytes and operations are those of treadle's plan.

    Each repetition's share of the peak uses the peaks measured right after it; the result has the
    median share.
    """
    passes = passes_of(model, test)

    def cost(rates: Peaks) -> PassCost:
        return PassCost.sum_of([PassCost.of(steps, runs, rates) for steps, runs in passes])

    peaks = alike(timed.peaks)
    works = [cost(rates) for rates in peaks]
    usual = {name: median(rates[name] for rates in peaks) for name in peaks[0]}
    work = cost(usual)
    for engine, times in zip(engines, timed.seconds, strict=True):
        middle = median(times)
        ours = engine.name == Treadle.name
        device = device_name(model) if ours else None
        told = ours and device is None  # else threads only wait for the device
        yield Result(
            test=test.name,
            depth=test.depth,
            threads=model.n_threads,
            sequences=test.sequences,
            tok_s=test.n_tokens / middle,
            tok_s_min=test.n_tokens / max(times),
            tok_s_max=test.n_tokens / min(times),
            bytes_s=work.n_bytes / middle if ours else None,
            ops_s=work.ops / middle if ours else None,
            share_of_peak=median(map(PassCost.share_of_peak, works, times)) if ours else None,
            engine=engine.name,
            model=name,
            format=next(iter(bytes_by_type(model.gguf.tensors.values())), "none"),
            peak=work.bound if ours else None,
            shares=work.shares(middle) if ours else None,
            peaks=usual,
            processor_time_share=timed.share(times, model.n_threads) if told else None,
            device=device,
        )


def passes_of(model: Any, test: Test) -> list[tuple[Any, list[tuple[Parts, int]]]]:
    """Return the work of a test as pairs of a plan and its runs; a run is (parts, number of logits
    rows), as ``Test.runs`` yields it.
    """
    encoder = model.engine.encoder
    if encoder is not None and test.kind == "pp":
        runs: list[tuple[Parts, int]] = [([(0, test.n)], 0)]
        return [(plan, runs) for plan in encoder.plans(test.n)]
    n_rows = test.n if test.kind == "pp" else test.sequences
    steps = model.plan(min(n_rows, model.engine.max_tokens), test.sequences)
    return [(steps, list(test.runs(steps.n_tokens)))]
