"""The page on a real server: what it asks is accepted, and a stopped answer costs nothing more."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from tests.page.conftest import Opened
from tests.page.test_answers import ask
from tests.page.test_kept import fill_all
from tests.page.test_pictures import give, is_drawn, painted, picture
from tests.server.conftest import Process, until
from treadle.sampling import Sampling
from treadle.server.protocols.llamacpp_answer import sampling_dict


@pytest.fixture(scope="module")
def slow_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server") / "slow"


@pytest.fixture(scope="module")
def server(one_kernel_cache: Path, slow_file: Path) -> Iterator[Process]:
    options = ("--metrics", "--no-log", "--n-ctx", "4096", "--alias", "demo")
    made = Process(*options, slow=slow_file)
    yield made
    made.popen.terminate()
    assert made.end()[0] == 0


SEES = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}
{{- message.content }}{% else %}{% for part in message.content %}
{%- if part.type == "image" %}<start_of_image>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{% endfor %}"""


@pytest.fixture(scope="module")
def seer(
    one_kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory, data: Path
) -> Iterator[Process]:
    """A server of a tiny Gemma 3 of random weights, whose pictures have 16 rows."""
    template = tmp_path_factory.mktemp("seer") / "sees.jinja"
    template.write_text(SEES)
    model = data / "media/gemma3/text.gguf"
    made = Process(str(model), "--chat-template", str(template), "--no-log")
    yield made
    made.popen.terminate()
    assert made.end()[0] == 0


@pytest.fixture
def slow(slow_file: Path) -> Iterator[Path]:
    """While this file is there no answer ends by itself before a test is done with it."""
    slow_file.touch()
    yield slow_file
    slow_file.unlink(missing_ok=True)


def metric(server: Process, name: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    found = re.search(rf"(?m)^{name}(?:\{{.*\}})? (.+)$", text)
    assert found is not None, name
    return float(found[1])


def setting(page: Page, **values: str) -> None:
    page.click("#settings-open")
    for name, value in values.items():
        field = page.locator(f"#set-{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
            field.blur()
    page.click("#settings-close")


def test_stop_frees_the_sequence(server: Process, slow: Path, visit: Opened) -> None:
    page = visit(server.url)
    page.click("#settings-open")
    page.check("#set-ignore_eos")
    page.click("#settings-close")
    cancelled = metric(server, "treadle:cancelled_total")
    ask(page, "def read_text(path):")
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    assert metric(server, "vllm:num_requests_running") == 1
    page.click("#stop")
    until(lambda: metric(server, "vllm:num_requests_running") == 0)
    assert metric(server, "treadle:cancelled_total") == cancelled + 1
    expect(page.locator(".note")).to_have_text("Stopped")


@pytest.mark.parametrize("mode", ["chat", "text"])
def test_every_setting_is_accepted(mode: str, server: Process, visit: Opened) -> None:
    page = visit(server.url)
    page.click("#settings-open")
    fill_all(page, sampling_dict(Sampling()) | {"logit_bias": [[5, -1.5]]})
    page.click("#settings-close")
    setting(
        page,
        mode=mode,
        max_tokens="5",
        stop="never\nthis",
        alternatives="3",
        thinking="off",
        reasoning_effort="low",
    )
    ask(page, "def f(x):")
    expect(page.locator(".note")).to_have_text("Stopped at the token limit")
    assert "5 tokens" in page.locator(".stats").inner_text()
    page.click('[data-does="tokens"]')
    expect(page.locator(".token")).to_have_count(5)
    assert page.locator(".alternatives li").count() in (3, 0)


def test_a_grammar_and_a_schema_hold(server: Process, visit: Opened) -> None:
    page = visit(server.url)
    setting(page, mode="chat", grammar='root ::= "<script>window.hit = 1</script>"')
    ask(page, "Attack")
    expect(page.locator(".assistant .markdown")).to_have_text("<script>window.hit = 1</script>")
    setting(page, grammar="", json_schema='{"const": {"a": 1}}')
    page.click('[data-does="again"]')
    expect(page.locator(".assistant .markdown")).to_contain_text('"a"')


def test_a_reload_in_mid_answer(server: Process, slow: Path, visit: Opened) -> None:
    """What was there stays, and the model goes on with it."""
    page = visit(server.url)
    setting(page, max_tokens="300")
    page.click("#settings-open")
    page.check("#set-ignore_eos")
    page.click("#settings-close")
    ask(page, "import os\n")
    expect(page.locator(".stats")).to_contain_text("tokens/s")
    answer = page.locator(".assistant .code-text")
    before = answer.text_content() or ""
    page.reload()
    slow.unlink()
    expect(page.locator(".note")).to_have_text("Stopped at the token limit")
    after = answer.text_content() or ""
    assert after.startswith(before)
    assert len(after) > len(before) > 0


def test_too_long_says_so(server: Process, visit: Opened) -> None:
    page = visit(server.url, expected="400")
    ask(page, "word " * 9000)
    expect(page.locator(".note.wrong")).to_contain_text("is too long")


def counted(page: Page) -> tuple[int, int]:
    """Tokens of the last answer's prompt, and how many of them were in the cache."""
    expect(page.locator(".note").last).to_have_text("Stopped at the token limit")
    text = page.locator(".stats").last.inner_text()
    found = re.search(r"Prompt tokens: (\d+) · Reused from cache: (\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])


def test_a_dropped_picture_is_read_once(seer: Process, visit: Opened) -> None:
    page = visit(seer.url)
    setting(page, max_tokens="3", temperature="0")
    page.click("#settings-open")
    page.check("#set-ignore_eos")
    page.click("#settings-close")
    ask(page, "Hello")
    n_text, _ = counted(page)
    page.click("#new")
    expect(page.get_by_role("button", name="Add pictures")).to_be_visible()
    give(page, "drop", "#log", picture(content=painted((300, 200))))
    expect(page.locator("#attached img")).to_have_count(1)
    ask(page, "Hello")
    n_prompt, _ = counted(page)
    assert n_prompt >= n_text + 16
    page.reload()
    is_drawn(page, ".user img")
    ask(page, "And now?")
    expect(page.locator(".stats")).to_have_count(2)
    n_all, n_cached = counted(page)
    assert n_all > n_prompt
    assert n_cached >= n_prompt - 1


def test_a_model_of_text_gets_no_picture(server: Process, visit: Opened) -> None:
    page = visit(server.url)
    expect(page.locator("#picture")).to_be_hidden()
    give(page, "drop", "#log", picture())
    expect(page.locator("#notice")).to_contain_text("cat.png: demo does not read pictures")
