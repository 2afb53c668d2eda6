"""docs/agents.md: its blocks are what ``treadle launch`` sets, and its JSON can be read."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.docs.test_docs import ROOT, blocks
from treadle.agents.server import folder_of
from treadle.agents.settings import Endpoint, shell_script
from treadle.agents.table import NAMES, find_agent

PAGE = ROOT / "docs" / "agents.md"
SECTION = re.compile(r"^<!-- launch (\w+) -->\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVER = Endpoint("http://127.0.0.1:8080", "qwen3-coder", 65536)
CACHE = Path("/home/me/.cache/treadle")


def expected(name: str) -> str:
    agent = find_agent(name)
    settings = agent.settings(SERVER, folder_of(CACHE, name, SERVER.url))
    return shell_script(agent, settings, []) + "\n"


def test_the_page_shows_what_launch_sets() -> None:
    shown = dict(SECTION.findall(PAGE.read_text("utf-8")))
    assert tuple(shown) == NAMES
    for name, text in shown.items():
        assert text == expected(name)


def test_its_json_can_be_read() -> None:
    found = [json.loads(block.text) for block in blocks(PAGE) if block.kind == "json"]
    assert len(found) == 1
