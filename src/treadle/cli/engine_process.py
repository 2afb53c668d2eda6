"""The engine processes of ``treadle serve`` with several models: ``python -m`` this module.

With ``--warm`` the process imports everything, and then forks engines on request. Without, it is
one engine; the first line of standard input is its order (``EngineOrder`` as JSON).
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import Any

from treadle.cli.engine_options import CheckedOptions, ServeRole
from treadle.cli.ui.progress import ProgressBar
from treadle.errors import TreadleError
from treadle.server.router.engine import (
    EngineOrder,
    ReportPipe,
    end_with_router,
    serve_engine,
    serve_speech_engine,
)

DONE = 0
FAILED = 1


def run_engine(value: Mapping[str, Any], report: int, life: int) -> int:
    """Load and serve the model of an order (``EngineOrder`` as JSON); return the exit code.
    ``report``: descriptor of the pipe on which the router gets progress and errors; ``life``:
    descriptor of a pipe whose other end the router holds: when that is closed, this process ends.
    """
    import click

    from treadle.base.caller_warnings import warnings_to
    from treadle.cli.commands.serve import command
    from treadle.cli.ui.table import remark, typed
    from treadle.server.http.log import COMMON

    order = EngineOrder.of(value)
    pipe = ReportPipe(report)
    end_with_router(life)
    COMMON["model"] = order.name
    told: set[str] = set()

    def tell(message: str) -> None:
        if message not in told:
            told.add(message)
            remark(f"{order.name}: warning: {message}")

    try:
        with warnings_to(tell):
            command.main(
                [*order.args, "--", order.ref],
                prog_name="treadle serve",
                standalone_mode=False,
                obj=EngineLoad(order, pipe),
            )
    except click.ClickException as error:
        pipe.send(failed=error.format_message())
    except (TreadleError, OSError) as error:
        pipe.send(failed=typed(error))
    except MemoryError:
        pipe.send(failed="out of memory")
    except (KeyboardInterrupt, SystemExit):
        return DONE
    except BaseException as error:
        traceback.print_exc()
        pipe.send(failed=f"internal error: {type(error).__name__}: {error}")
    else:
        return DONE
    return FAILED


class ReportedProgress(ProgressBar):
    """Sends the progress of loading to the router, in place of a bar on the terminal."""

    def __init__(self, pipe: ReportPipe) -> None:
        super().__init__()
        self.enabled = False
        self._pipe = pipe

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` units of ``stage`` are done."""
        self._pipe(stage, done, total)


class EngineLoad(ServeRole):
    """Loads the model of an order with the checked options, and serves it to the router."""

    def __init__(self, order: EngineOrder, pipe: ReportPipe) -> None:
        self.order = order
        self.pipe = pipe

    def take(self, checked: CheckedOptions) -> None:
        """Load the model and serve it until the router ends. Raises TreadleError if it cannot be
        loaded.
        """
        from treadle.cli.load import find_model, keeps_states, load_model, warn_of_template
        from treadle.cli.speech import load_recognizer, speech_model_path
        from treadle.cli.ui.table import remark

        loading = checked.loading
        if loading.get("kv_tokens"):  # the default size: no option names one
            loading["kv_bytes"] = self.order.kv_bytes
        progress = ReportedProgress(self.pipe)
        own = replace(
            checked.settings,
            alias=self.order.name,
            api_keys=self.order.keys,
            page=False,
            allow_origins=(),
            is_engine=True,
        )
        if (speech := speech_model_path(checked.models[0], progress)) is not None:
            with load_recognizer(speech, progress, loading) as recognizer:
                serve_speech_engine(recognizer, own, self.order, self.pipe)
            return
        # The option is for all models, and page files hold no state of layers.
        if loading.get("cache_dir") and keeps_states(find_model(checked.models[0], progress)):
            loading["cache_dir"] = None
            remark(f"{self.order.name}: --cache-dir is left out: layers of this model keep a state")
        loaded = load_model(checked.models[0], progress, **loading)
        warn_of_template(loaded, progress)
        toolbox = checked.tool_servers.open()
        with loaded, toolbox or nullcontext():
            serve_engine(loaded, replace(own, toolbox=toolbox), self.order, self.pipe)


def main() -> int:
    """Run the process that forks engines (``--warm``), or one engine; return the exit code."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "--warm" in sys.argv[1:]:
        from treadle.server.router.spawner import preload
        from treadle.system import SYSTEM

        SYSTEM.end_with_parent()
        preload()
        # By its name: the type checker knows it only on systems that fork.
        import_module("treadle.system.fork_server").ForkServer(run_engine).serve()
        return DONE
    line = b""
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            return DONE
        line += part
    report = os.dup(1)
    os.dup2(2, 1)
    return run_engine(json.loads(line), report, 0)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
