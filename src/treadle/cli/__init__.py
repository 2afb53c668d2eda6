"""The command line: one file per command, and nothing here that could slow a start."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's takes long to import, and Ctrl-C has a traceback until then
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 failed with one clear line, 2 wrong usage, 130 interrupted, 141 the reader of our
    output went away.
    """
    try:
        from treadle.base.gc_pause import garbage_kept

        with garbage_kept():
            from treadle.cli.app import invoke
    except KeyboardInterrupt:  # Ctrl-C while Python is still importing leaves no traceback either
        return 130
    return invoke(argv)


def run_process() -> None:
    """``main`` as a whole process, which ends at once: tearing down Python's modules and LLVM's
    takes a tenth of a short run, and the system takes the memory back in any case.
    """
    try:
        # numpy brings a BLAS whose threads spin for 25 ms when they start, on cores that ours want;
        # what numpy multiplies here is small.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        open_streams()
        leave_on_signals()
        code = main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:  # early, or a second one while the first is told
        code = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it any more; the exit code tells
            code = code or 1
        except KeyboardInterrupt:  # its reader is slow
            code = 130
    os._exit(code)


def open_streams() -> None:
    """Put something in the place of standard streams that were closed (``2>&-``): Python leaves
    None there, and the next file that is opened would take the number. Standard input and error are
    empty; standard output refuses what is written, so that no text is lost without an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            access = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            number = os.open(os.devnull, access)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


def leave_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as an error would: what is half written goes."""

    import signal

    class TerminatedBySignal(SystemExit):
        """Raised by a signal."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # the second one ends it at once
        raise TerminatedBySignal(128 + number)

    def once_more(lost: sys.UnraisableHookArgs) -> None:
        # It came while Python ran a finalizer or a weak reference's callback, as in an import:
        # what is raised there is dropped, so the signal is sent again a little later.
        if isinstance(lost.exc_value, TerminatedBySignal):
            number = int(str(lost.exc_value.code)) - 128
            signal.signal(number, leave)
        elif isinstance(lost.exc_value, KeyboardInterrupt):
            number = signal.SIGINT
        else:
            sys.__unraisablehook__(lost)
            return
        from threading import Timer

        Timer(0.01, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = once_more

    known = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))  # Windows lacks one
    for number in filter(None, known):
        if signal.getsignal(number) is signal.SIG_DFL:  # else who started us had reasons
            signal.signal(number, leave)
