"""The agents that ``treadle launch`` starts (AGENTS), and a function for each that returns the
settings that make it use ``server``. They follow the documents and sources of the versions that
docs/agents.md names.

No function changes the user's own files. Settings are environment variables or arguments where the
agent reads those; else files in ``folder``, which belongs to treadle. The agent reads them besides
its own configuration or, if it has no other way, in place of it.
"""

from __future__ import annotations

import json
from pathlib import Path

from treadle.agents.settings import Agent, AgentSettings, Endpoint, json_text
from treadle.errors import TreadleError

PROVIDER = "treadle"  # the name of the server in an agent's list of providers
PATIENCE_MS = 3_600_000  # a long prompt is read for minutes on a CPU; agents give up after five


def claude(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for Claude Code: environment variables, and a settings file with the same
    variables, which overrides those in the user's settings. All its model names (Haiku, Sonnet,
    Opus ...) become ``server.model``.
    """
    names = (
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",
        "ANTHROPIC_DEFAULT_HAIKU_MODEL",
        "ANTHROPIC_DEFAULT_SONNET_MODEL",
        "ANTHROPIC_DEFAULT_OPUS_MODEL",
    )
    variables = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        **dict.fromkeys(names, server.model),
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(server.n_context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(server.max_answer),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_MS),
    }
    path = folder / "settings.json"
    return AgentSettings(
        variables=variables,
        removed=("ANTHROPIC_API_KEY",),
        arguments=("--settings", str(path)),
        files={path: json_text({"env": variables})},
    )


def codex(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for Codex: ``-c`` arguments (values in TOML), which override config.toml."""
    provider = f"model_providers.{PROVIDER}"
    settings = {
        "model_provider": PROVIDER,
        "model": server.model,
        "model_context_window": server.n_context,
        f"{provider}.name": PROVIDER,
        f"{provider}.base_url": server.base_url,
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "TREADLE_AGENT_KEY",
        f"{provider}.stream_idle_timeout_ms": PATIENCE_MS,
        "check_for_update_on_startup": False,
    }
    given = [f"{name}={json.dumps(value)}" for name, value in settings.items()]
    return AgentSettings(
        variables={"TREADLE_AGENT_KEY": server.key},
        arguments=tuple(word for text in given for word in ("-c", text)),
    )


def opencode(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for opencode: a variable with a JSON configuration, which overrides files."""
    model = f"{PROVIDER}/{server.model}"
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": model,
        "small_model": model,
        "autoupdate": False,
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {"baseURL": server.base_url, "apiKey": server.key, "timeout": False},
                "models": {
                    server.model: {
                        "name": server.model,
                        "tool_call": True,
                        "attachment": server.sees,
                        "limit": {"context": server.n_context, "output": server.max_answer},
                    }
                },
            }
        },
    }
    return AgentSettings(variables={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def qwen(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for Qwen Code: variables and a system settings file, both of which override
    the user's settings.
    """
    path = folder / "settings.json"
    config = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {
            "name": server.model,
            "generationConfig": {
                "contextWindowSize": server.n_context,
                "timeout": PATIENCE_MS,
                "samplingParams": {"max_tokens": server.max_answer},
            },
        },
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return AgentSettings(
        variables={
            "OPENAI_BASE_URL": server.base_url,
            "OPENAI_API_KEY": server.key,
            "OPENAI_MODEL": server.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": str(path),
        },
        arguments=("--auth-type", "openai"),
        files={path: json_text(config)},
    )


def pi(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for pi: an extension that adds ``server`` as a provider to the user's own."""
    path = folder / "treadle.js"
    provider = {
        "name": PROVIDER,
        "baseUrl": server.base_url,
        "apiKey": server.key,
        "api": "openai-completions",
        "models": [
            {
                "id": server.model,
                "name": server.model,
                "reasoning": False,
                "input": ["text", "image"] if server.sees else ["text"],
                "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
                "contextWindow": server.n_context,
                "maxTokens": server.max_answer,
            }
        ],
    }
    text = (
        "export default function (pi) {\n"
        f'  pi.registerProvider("{PROVIDER}", {json.dumps(provider, indent=2)});\n'
        "}\n"
    )
    return AgentSettings(
        variables={"PI_SKIP_VERSION_CHECK": "1"},
        arguments=("-e", str(path), "--provider", PROVIDER, "--model", server.model),
        files={path: text},
    )


def continue_cli(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for Continue's CLI: a config.yaml, written as JSON, which is valid YAML."""
    path = folder / "config.yaml"
    config = {
        "name": PROVIDER,
        "version": "1.0.0",
        "schema": "v1",
        "models": [
            {
                "name": server.model,
                "provider": "openai",
                "model": server.model,
                "apiBase": server.base_url,
                "apiKey": server.key,
                "roles": ["chat", "edit", "apply", "summarize"],
                "capabilities": ["tool_use", *(["image_input"] if server.sees else [])],
                "defaultCompletionOptions": {
                    "contextLength": server.n_context,
                    "maxTokens": server.max_answer,
                },
            }
        ],
    }
    return AgentSettings(arguments=("--config", str(path)), files={path: json_text(config)})


def cline(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for Cline's CLI: a configuration folder that replaces the user's."""
    settings = folder / "data" / "settings"
    provider = "openai-compatible"
    chosen = {
        "provider": provider,
        "apiKey": server.key,
        "model": server.model,
        "baseUrl": server.base_url,
    }
    providers = {
        "version": 1,
        "lastUsedProvider": provider,
        "modes": {},
        "providers": {
            provider: {
                "settings": chosen,
                "updatedAt": "2026-01-01T00:00:00.000Z",
                "tokenSource": "manual",
            }
        },
    }
    model = {
        "name": server.model,
        "contextWindow": server.n_context,
        "maxTokens": server.max_answer,
        "supportsVision": server.sees,
    }
    models = {"version": 1, "providers": {provider: {"models": {server.model: model}}}}
    return AgentSettings(
        arguments=("--config", str(folder)),
        files={
            settings / "providers.json": json_text(providers),
            settings / "models.json": json_text(models),
        },
    )


def aider(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for aider: variables for its options, and a file with the model's limits."""
    path = folder / "models.json"
    name = f"openai/{server.model}"
    limits = {
        name: {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": server.n_context,
            "max_output_tokens": server.max_answer,
            "max_tokens": server.max_answer,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
            "supports_vision": server.sees,
        }
    }
    return AgentSettings(
        variables={
            "OPENAI_API_BASE": server.base_url,
            "OPENAI_API_KEY": server.key,
            "AIDER_MODEL": name,
            "AIDER_WEAK_MODEL": name,
            "AIDER_MODEL_METADATA_FILE": str(path),
            "AIDER_CHECK_UPDATE": "false",
            "AIDER_ANALYTICS": "false",
        },
        files={path: json_text(limits)},
    )


def goose(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for goose: variables, which override its configuration file; nothing is
    written to ``folder``.
    """
    return AgentSettings(
        variables={
            "GOOSE_PROVIDER": "openai",
            "GOOSE_MODEL": server.model,
            "GOOSE_CONTEXT_LIMIT": str(server.n_context),
            "GOOSE_MAX_TOKENS": str(server.max_answer),
            "OPENAI_HOST": server.url,
            "OPENAI_BASE_PATH": "v1/chat/completions",
            "OPENAI_API_KEY": server.key,
            "OPENAI_TIMEOUT": str(PATIENCE_MS // 1000),
        }
    )


def crush(server: Endpoint, folder: Path) -> AgentSettings:
    """Return settings for Crush: folders for its configuration and its state, in place of the
    user's. A model stored in the user's state folder would override the configured one.
    """
    path = folder / "config" / "crush.json"
    chosen = {"provider": PROVIDER, "model": server.model, "max_tokens": server.max_answer}
    config = {
        "$schema": "https://charm.land/crush.json",
        "options": {"disable_provider_auto_update": True, "disable_metrics": True},
        "models": {"large": chosen, "small": chosen},
        "providers": {
            PROVIDER: {
                "name": PROVIDER,
                "type": "openai-compat",
                "base_url": server.base_url,
                "api_key": server.key,
                "models": [
                    {
                        "id": server.model,
                        "name": server.model,
                        "context_window": server.n_context,
                        "default_max_tokens": server.max_answer,
                        "supports_attachments": server.sees,
                    }
                ],
            }
        },
    }
    return AgentSettings(
        variables={
            "CRUSH_GLOBAL_CONFIG": str(path.parent),
            "CRUSH_GLOBAL_DATA": str(folder / "data"),
        },
        files={path: json_text(config)},
    )


NPM = "npm install -g"
AGENTS = (
    Agent(
        "claude",
        "Claude Code",
        "claude",
        f"{NPM} @anthropic-ai/claude-code",
        claude,
        ("claude-code",),
    ),
    Agent("codex", "Codex", "codex", f"{NPM} @openai/codex", codex),
    Agent("opencode", "opencode", "opencode", f"{NPM} opencode-ai", opencode, ("opencode-ai",)),
    Agent("qwen", "Qwen Code", "qwen", f"{NPM} @qwen-code/qwen-code", qwen, ("qwen-code",)),
    Agent("pi", "pi", "pi", f"{NPM} @earendil-works/pi-coding-agent", pi),
    Agent("continue", "Continue", "cn", f"{NPM} @continuedev/cli", continue_cli, ("cn",)),
    Agent("cline", "Cline", "cline", f"{NPM} cline", cline),
    Agent("aider", "aider", "aider", "python -m pip install aider-chat", aider),
    Agent(
        "goose",
        "goose",
        "goose",
        "curl -fsSL https://github.com/block/goose/releases/download/stable/download_cli.sh | bash",
        goose,
    ),
    Agent("crush", "Crush", "crush", f"{NPM} @charmland/crush", crush),
)
NAMES = tuple(agent.name for agent in AGENTS)


def find_agent(name: str) -> Agent:
    """Return an agent by name or alias. Raises TreadleError, which suggests the nearest name."""
    from difflib import get_close_matches

    known = {each: agent for agent in AGENTS for each in (agent.name, *agent.aliases)}
    wanted = name.lower()
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1)
    meant = f"did you mean '{known[near[0]].name}'? " if near else ""
    raise TreadleError(f"no agent '{name}'; {meant}treadle launches {', '.join(NAMES)}")
