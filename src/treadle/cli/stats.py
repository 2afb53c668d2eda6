"""Summary of a run in a few lines: kernels, speeds, context, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from treadle.base.humanize import counted, n_bytes
from treadle.cli.conversation import AnswerCost, decode_text, with_speed
from treadle.cli.load import device_name
from treadle.cli.ui.table import printable

if TYPE_CHECKING:
    from treadle.api.model import Model


def report(model: Model, turn: AnswerCost) -> str:
    """Format the summary of a run, whose answer cost ``turn``: one line for each subject."""
    lines = {
        "device": printable(device_name(model) or ""),
        "cpu": cpu(model),
        "kernels": kernels_line(model),
        "prompt": prompt(turn),
        "pictures": turn.media_text,
        "text": decode_text([turn]),
        "context": f"{turn.n_context} of {turn.n_ctx} tokens",
        "memory": memory(model),
        "disk": disk(model),
    }
    return "\n".join(f"{name:<8} {text}" for name, text in lines.items() if text)


def prompt(turn: AnswerCost) -> str:
    """Format the number of prefilled tokens, their speed, and the tokens reused from the cache."""
    n = turn.n_read
    n_cached = turn.timings.n_cached
    text = with_speed(counted(n, "token"), n, turn.timings.prefill_s)
    return f"{text}, {n_cached} reused from the cache" if n_cached else text


def cpu(model: Model) -> str:
    """Format the processor's name and the threads in use."""
    from treadle.machine.topology import cpu_name

    threads = counted(model.n_threads, "thread")
    name = printable(cpu_name())
    return f"{name if len(name) <= 56 else name[:55] + '…'}, {threads}"


def kernels_line(model: Model) -> str:
    """Format how many kernels were compiled and how many came from the cache, the instruction set,
    and the seconds.
    """
    tally = model.engine.kernels
    made = [f"{tally.n_compiled} compiled"] if tally.n_compiled else []
    made += [f"{tally.n_cached} from the cache"] if tally.n_cached else []
    return f"{' and '.join(made) or '0'} for {model.isa.name} in {brief(tally.seconds)} s"


def brief(seconds: float) -> str:
    """Format seconds with two digits: ``0.031``, ``1.7``; from 10 on as a whole number, ``104``."""
    return f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"


def disk(model: Model) -> str:
    """Format the bytes that the process has read from disk; "" if the model fits into memory."""
    from treadle.devices.cpu.residence import read_bytes, shortage

    n_read = read_bytes() if shortage(model.gguf.paths) else None
    return "" if n_read is None else f"{n_bytes(n_read)} read"


def memory(model: Model) -> str:
    """Format the process's peak memory, and how much of it are mapped pages of the model's file."""
    from treadle.devices.cpu.residence import mapped_bytes, peak_bytes

    peak = peak_bytes()
    mapped = mapped_bytes(model.gguf.paths)
    if peak is None:  # not every system reports it
        return ""
    if mapped is None:
        return f"peak {n_bytes(peak)}; the file has {n_bytes(model.gguf.n_bytes)}"
    return f"peak {n_bytes(peak)}, of which {n_bytes(mapped)} are the mapped file"
