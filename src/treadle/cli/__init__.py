"""The command line: one file per command. Nothing is imported here that could slow a start."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing imports slowly, and until then Ctrl-C prints a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done, 1 failed with one clear line, 2 wrong usage, 130 interrupted, 141 standard output's
    reader has closed the pipe.
    """
    try:
        from treadle.base.gc_pause import garbage_kept

        with garbage_kept():
            from treadle.cli.app import invoke
    except KeyboardInterrupt:  # no traceback for Ctrl-C during imports either
        return 130
    return invoke(argv)


def run_process() -> None:
    """Run ``main`` as a whole process, and end it at once: tearing down Python's modules and LLVM's
    takes a tenth of a short run, and the system frees the memory in any case.
    """
    try:
        # The threads of numpy's BLAS spin for 25 ms when they start, on cores that ours need;
        # products computed with numpy here are small.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        open_streams()
        leave_on_signals()
        code = main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except KeyboardInterrupt:  # early, or a second one while the first is reported
        code = 130
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # its reader is gone; only the exit code is left
            code = code or 1
        except KeyboardInterrupt:  # while a slow reader blocks the flush
            code = 130
    if "treadle.jit.kernel" in sys.modules:
        end_compile_processes()
    os._exit(code)


def end_compile_processes() -> None:
    """End processes that still compile kernels for later."""
    from contextlib import suppress

    from treadle.jit import kernel

    with suppress(KeyboardInterrupt, SystemExit):
        kernel.end_compile_processes()


def open_streams() -> None:
    """Replace standard streams that were closed (``2>&-``): Python leaves None there, and the next
    opened file would take the descriptor. Standard input and error become empty; standard output
    refuses writes, so that no text is lost without an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            access = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            number = os.open(os.devnull, access)
            setattr(sys, name, open(number, mode, encoding="utf-8"))  # noqa: SIM115


def leave_on_signals() -> None:
    """Let SIGTERM and SIGHUP end the program as an error does, so that half-written files are
    removed.
    """

    import signal

    class TerminatedBySignal(SystemExit):
        """Raised by a signal handler."""

    def leave(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
        raise TerminatedBySignal(128 + number)

    def once_more(lost: sys.UnraisableHookArgs) -> None:
        # The signal came during a finalizer or a weak reference's callback, as in an import, where
        # exceptions are dropped: so send the signal again a little later.
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
        if signal.getsignal(number) is signal.SIG_DFL:  # else the parent process set it on purpose
            signal.signal(number, leave)
