"""The command line: one file per command in ``commands/``, and the modules that they share.

::

    app.py                 the click group: imports the called command, errors to exit codes
    commands/              one file per command
    ui/                    terminal input and output: tables, progress bar, Markdown, charts

    options.py             MODEL, and options of several commands: loading, KV cache, sampling
    answer_options.py      options of answers: of one answer, and defaults of all
    engine_options.py      options of ``serve`` that a router passes on to its engines
    door_options.py        options of a server's access: API keys, TLS, path prefix
    foreign_options.py     options of other programs, and what to use in their place
    environment.py         environment variables of options: ``TREADLE_SERVE_PORT``

    load.py                MODEL to a path, and to a loaded model, with its warnings
    speech.py              MODEL to a loaded speech model
    media_files.py         pictures and sounds on the command line and in a chat
    tool_servers.py        MCP servers, and the user's approval of their tools' calls
    bundled.py             entry point of a bundle (``treadle bundle``)

    conversation.py        state of a chat: messages and slash commands
    settings.py            settings that ``/set`` changes in a chat
    transcript.py          a conversation as a JSON file
    reply_view.py          display of one answer, with its reasoning folded
    stats.py               summary of a run: kernels, speeds, context, memory

    router.py              ``serve`` with several models
    presets.py             TOML files of models and their options
    engine_process.py      the engine processes of that server
    server_client.py       GET requests to a running server

    speed.py               speeds as shares of this machine's measured peaks
    profile.py             time of each step of a forward pass
    bench_engines.py       engines that ``bench`` times: treadle, llama.cpp
    bench_results.py       results of ``bench``, and their table
    bench_plot.py          chart of ``bench``
    bench_speech.py        ``bench`` of speech models
    tune_results.py        results of ``tune``, and their tables
    tune_plot.py           chart of ``tune``

    model_report.py        facts of a stored model, for ``list`` and ``show``
    metadata.py            formatting of a file's metadata
    file_diff.py           comparison of two model files
    projector.py           projector files in ``plan``, ``bench`` and ``inspect``

This file has the console script: ``run_process`` sets up the process (streams, signals, exit code),
and ``main`` calls ``invoke`` in ``app.py``. It imports nothing at its top that could slow a start.
"""

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
        from treadle.base.gc_pause import imports_kept

        with imports_kept():
            from treadle.cli.app import invoke
    except KeyboardInterrupt:  # no traceback for Ctrl-C during imports either
        return 130
    return invoke(argv)


def run_process() -> None:
    """Run ``main`` as a whole process, and end it at once: tearing down Python's modules and LLVM's
    takes a tenth of a short run, and the system frees the memory in any case.
    """
    try:
        from treadle.base.gc_pause import own_process

        # The threads of numpy's BLAS spin for 25 ms when they start, on cores that ours need;
        # products computed with numpy here are small.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        open_streams()
        leave_on_signals()
        own_process()
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
    """End the processes that compile kernels in the background."""
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

    # The C module behind signal, which makes enums of all its names.
    import _signal as signal  # type: ignore[import-not-found]

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
