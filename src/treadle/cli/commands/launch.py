"""``treadle launch``: a coding agent on a model of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from treadle.agents.process import find_executable, run_agent
from treadle.agents.server import SEQUENCES, AgentServer, agent_context, folder_of
from treadle.agents.settings import Agent, AgentSettings, Endpoint, past_proxy, shell_script
from treadle.agents.table import AGENTS, find_agent
from treadle.cli.server_client import ADDRESS, API_KEY, UNIX, get, mapping
from treadle.cli.ui.progress import ProgressBar
from treadle.cli.ui.table import print_table, remark
from treadle.errors import TreadleError
from treadle.jit.cache import folder

SMALL = 16384  # the first prompts of most agents have 5,000 to 20,000 tokens
UNKNOWN_CONTEXT = 32768  # the default of `treadle serve`
HIDDEN = "..."


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("agent", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--model", metavar="NAME", help="Model: as for `treadle serve`.")
@click.option(
    "--url",
    metavar="URL",
    envvar="TREADLE_URL",
    help=f"Use this server, and start none. By default one that answers at {ADDRESS} is used if it "
    "has the model.",
)
@API_KEY
@click.option(
    "-c",
    "--context",
    type=click.IntRange(1),
    metavar="N",
    help="Context of a server that is started: by default 65536 tokens, or fewer if the model was "
    "trained for fewer, or memory is short.",
)
@click.option(
    "--print",
    "only_print",
    is_flag=True,
    help="Print variables, files and command as a shell script, and do nothing.",
)
def command(
    agent: str | None,
    arguments: tuple[str, ...],
    model: str | None,
    url: str | None,
    api_key: str | None,
    context: int | None,
    only_print: bool,
) -> None:
    """Start a coding AGENT on a local model.

    AGENT is claude, codex, opencode, qwen, pi, continue, cline, aider, goose or crush; without one
    they are listed. What follows `--` goes to the agent: `treadle launch claude -- -p hello`. If no
    treadle answers with the model, a server is started for it, and stopped when it ends. The user's
    own configuration of the agent is not changed.
    """
    if agent is None:
        list_agents()
        return
    row = find_agent(agent)
    if url is not None and url.startswith(UNIX):
        raise click.UsageError(f"--url {url}: agents need http://HOST:PORT")
    if only_print:
        print_script(row, arguments, model, url, api_key, context)
        return
    executable = find_executable(row, os.environ.get("PATH"))
    with ExitStack() as stack:
        server = None
        endpoint = find_server(url or ADDRESS, model, api_key, explicit=url is not None)
        if endpoint is None:
            server, endpoint = start_server(stack, model, api_key, context)
        place = folder_of(folder(), row.name, endpoint.url)
        settings = settings_of(row, endpoint, place)
        settings.write_files()
        if server is not None:  # nothing listens there later
            stack.callback(shutil.rmtree, place, ignore_errors=True)
        tell(row, endpoint, settings)
        words = [*settings.arguments, *arguments]
        code = run_agent(executable, words, settings.environment(os.environ))
        if server is not None and server.has_ended():
            remark(f"the server ended before the agent: {server.last_message()}")
    raise click.exceptions.Exit(code)


def list_agents() -> None:
    """Print a table of the agents, which of them are installed, and how to install each."""
    rows = [
        (row.name, row.title, "yes" if shutil.which(row.executable) else "", row.install)
        for row in AGENTS
    ]
    print_table(["name", "agent", "installed", "to install"], rows, optional=("to install",))


def find_server(
    url: str, model: str | None, api_key: str | None, *, explicit: bool
) -> Endpoint | None:
    """Return the endpoint of a running server that has ``model``; None if there is none.

    ``explicit``: the user named ``url``; then it is an error if nothing answers there, or if it
    serves another model. Otherwise only models of treadle servers count. Raises TreadleError also
    if ``model`` is None and the server has several that write text, or none.
    """
    url = url.rstrip("/")
    try:
        listing = get(url, "/v1/models", api_key)
    except TreadleError:
        if explicit:
            raise
        return None
    models = [mapping(each) for each in mapping(listing).get("data") or ()]
    if not explicit:
        models = [each for each in models if each.get("owned_by") == "treadle"]
    if not models and not explicit:
        return None
    writers = [each for each in models if writes(each)]
    if model is None:
        if not writers:
            raise TreadleError(f"{url} serves no model that writes text")
        if len(writers) > 1:
            names = ", ".join(str(each.get("id")) for each in writers)
            raise TreadleError(f"{url} has several models: name one with --model: {names}")
        return endpoint_of(url, writers[0], api_key)
    wanted = names_of(model)
    for each in models:
        if wanted & {plain(str(name)) for name in (each.get("id"), *(each.get("aliases") or ()))}:
            if not writes(each):
                raise TreadleError(f"{url}: the model {each.get('id')} writes no text")
            return endpoint_of(url, each, api_key)
    names = ", ".join(str(each.get("id")) for each in models) or "nothing"
    if explicit:
        raise TreadleError(f"{url} serves {names}, not {model}")
    remark(f"the server at {url} serves {names}, not {model}: another one is started")
    return None


def writes(model: Mapping[str, Any]) -> bool:
    """Return whether a model, an entry of ``/v1/models``, writes text; True if the server does not
    say.
    """
    gives = mapping(model.get("architecture")).get("output_modalities")
    return not isinstance(gives, list) or "text" in gives


def endpoint_of(url: str, model: Mapping[str, Any], api_key: str | None) -> Endpoint:
    """Return the endpoint of a model, an entry of ``/v1/models`` at ``url``."""
    n_context = mapping(model.get("meta")).get("n_ctx")
    reads = mapping(model.get("architecture")).get("input_modalities")
    return Endpoint(
        url,
        str(model.get("id")),
        n_context if isinstance(n_context, int) and n_context > 0 else UNKNOWN_CONTEXT,
        api_key,
        isinstance(reads, list) and "image" in reads,
    )


def names_of(model: str) -> set[str]:
    """Return the names, in comparable form, under which a server may list MODEL."""
    from treadle.catalog.names import find_named, whole_names

    names = {plain(model), plain(Path(model).name)}
    if not os.path.exists(model) and (found := find_named(model)) is not None:
        names |= {plain(name) for name in whole_names(found.model)}
        names.add(plain(found.model.path.name))
    return names


def plain(name: str) -> str:
    """Return a model's name in comparable form: lower case, without ``.gguf``."""
    return name.lower().removesuffix(".gguf")


def start_server(
    stack: ExitStack, model: str | None, api_key: str | None, context: int | None
) -> tuple[AgentServer, Endpoint]:
    """Start ``treadle serve``, which ``stack`` stops, and wait until it is ready; return it with
    its endpoint. ``context``: tokens, None for a size that fits agents. Raises TreadleError without
    a model.
    """
    if model is None:
        raise TreadleError(
            f"no treadle answers at {ADDRESS}: name the model with --model, as `treadle list` "
            "shows it, and a server is started for it"
        )
    n_context = context or good_context(model)
    arguments = [*serve_arguments(model, n_context), "--port", "0", "--no-log"]
    server = stack.enter_context(AgentServer(arguments, api_key))
    with ProgressBar() as progress:
        url = server.wait(lambda: progress(f"starting treadle serve {model}", 0, 0))
    endpoint = find_server(url, None, api_key, explicit=True)
    assert endpoint is not None
    return server, endpoint


def serve_arguments(model: str, n_context: int | None) -> list[str]:
    """Return the arguments of ``treadle serve`` for an agent: the model, and a context of
    ``n_context`` tokens for each of SEQUENCES sequences; the model alone without ``n_context``.
    """
    if n_context is None:
        return [model]
    return [model, "-c", str(n_context), "--sequences", str(SEQUENCES)]


def good_context(model: str) -> int | None:
    """Return the context in tokens that agents need and memory allows; None if the model is not on
    this machine yet, or its context is unknown.
    """
    from treadle.catalog.facts import facts_of, read_header
    from treadle.catalog.names import find_named
    from treadle.machine.memory import usable_memory

    if os.path.exists(model):
        from treadle.cli.load import find_model

        facts = read_header(find_model(model))
    elif (found := find_named(model)) is not None:
        facts = facts_of(found.model)
    else:
        return None
    if not facts.n_context:
        return None
    bound = usable_memory()
    return agent_context(facts.n_context, facts.full_kv_bytes, bound and bound.free_bytes)


def settings_of(agent: Agent, endpoint: Endpoint, place: Path) -> AgentSettings:
    """Return an agent's variables, arguments and files (in the folder ``place``) for an endpoint,
    and variables that keep this machine's proxy away from it.
    """
    settings = agent.settings(endpoint, place)
    proxy = past_proxy(endpoint.url, os.environ)
    return replace(settings, variables={**settings.variables, **proxy})


def tell(agent: Agent, endpoint: Endpoint, settings: AgentSettings) -> None:
    """Write the agent's model and what was set for it (variables, files, arguments) to standard
    error; the API key is hidden.
    """
    room = f"{endpoint.n_context} tokens of context"
    remark(f"{agent.title} on {endpoint.model} at {endpoint.url}, {room}")
    if endpoint.n_context < SMALL:
        remark("warning: the prompts of most agents alone have 5,000 to 20,000 tokens")
    variables = {
        name: HIDDEN if endpoint.api_key and endpoint.api_key in text else text
        for name, text in settings.variables.items()
    }
    for name, text in variables.items():
        remark(f"set {name}={text}")
    for name in settings.removed:
        if name in os.environ:
            remark(f"unset {name}")
    for path in settings.files:
        remark(f"wrote {path}")
    if settings.arguments:
        remark(f"started with {shlex.join(settings.arguments)}")


def print_script(
    agent: Agent,
    arguments: Sequence[str],
    model: str | None,
    url: str | None,
    api_key: str | None,
    context: int | None,
) -> None:
    """Print what ``launch`` would do with these values of its options, as a shell script."""
    endpoint = find_server(url or ADDRESS, model, api_key, explicit=url is not None)
    if endpoint is None:
        name = Path(model).name.removesuffix(".gguf") if model else "MODEL"
        n_context = context or (good_context(model) if model else None)
        started = serve_arguments(model or name, n_context)
        click.echo(f"# No treadle answers at {ADDRESS}. Without --print one is started for")
        click.echo(f"# the agent, on a free port: treadle serve {shlex.join(started)}")
        endpoint = Endpoint(ADDRESS, name, n_context or UNKNOWN_CONTEXT, api_key)
    place = folder_of(folder(), agent.name, endpoint.url)
    settings = settings_of(agent, endpoint, place)
    click.echo(shell_script(agent, settings, arguments))
