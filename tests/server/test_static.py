"""The page's files: who gets them, with which headers, and that they are what they should be."""

from __future__ import annotations

import hashlib
import re

import pytest
from starlette.testclient import TestClient

import treadle
from tests.server.conftest import running, talking
from tools.page_libraries import LIBRARIES
from treadle.kvcache.prefix_tree import WHY
from treadle.server.static import page_files

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
OWN = {name: content for name, (content, _) in page_files().items() if "vendor/" not in name}


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/plain"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_clients_of_ollama_find_a_server(method: str, accept: str, client: TestClient) -> None:
    answer = client.request(method, "/", headers={"accept": accept})
    assert answer.status_code == 200
    assert answer.text == ("Ollama is running" if method == "GET" else "")
    assert answer.headers["vary"] == "Accept"


def test_a_browser_gets_the_page(client: TestClient) -> None:
    answer = client.get("/", headers=HTML)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in answer.headers["content-security-policy"]
    tag = answer.headers["etag"]
    again = client.get("/", headers={**HTML, "if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={**HTML, "if-none-match": '"other"'}).status_code == 200


def test_all_that_the_page_names_is_there(client: TestClient) -> None:
    named = set(re.findall(r'(?:src|href)="(page/[^"]+)"', OWN["index.html"].decode()))
    for name, content in OWN.items():
        if name.endswith(".js"):
            found = re.findall(r'^import .*?"\./([^"]+)"', content.decode(), re.MULTILINE)
            named |= {f"page/{each}" for each in found}
    assert {"page/app.js", "page/style.css", "page/icon.svg"} < named
    for path in named:
        answer = client.get(f"/{path}")
        assert answer.status_code == 200, path
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in ("text/javascript", "text/css", "image/svg+xml")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert named == {
        f"page/{name}" for name in page_files() if not name.endswith((".txt", ".html"))
    }


@pytest.mark.parametrize(
    "path", ["/page/../app.py", "/page/%2e%2e/app.py", "/page/", "/page/vendor"]
)
def test_nothing_else_is_sent(path: str, client: TestClient) -> None:
    assert client.get(path).status_code == 404


def test_the_page_needs_no_key_but_all_else_does(model: treadle.Model) -> None:
    with running(model, api_keys=("secret",)) as service, talking(service) as client:
        assert client.get("/", headers=HTML).status_code == 200
        assert client.get("/page/app.js").status_code == 200
        assert client.get("/props").status_code == 401


@pytest.mark.parametrize("page", [True, False])
def test_a_server_with_a_key_is_found(page: bool, model: treadle.Model) -> None:
    with running(model, page=page, api_keys=("secret",)) as service, talking(service) as client:
        assert client.get("/").text == "Ollama is running"
        assert client.head("/").status_code == 200
        assert client.get("/api/tags").status_code == 401


def test_a_server_without_the_page(model: treadle.Model) -> None:
    with running(model, page=False) as service, talking(service) as client:
        assert client.get("/", headers=HTML).text == "Ollama is running"
        assert client.get("/page/app.js").status_code == 404


# -- what is in them ------------------------------------------------------------------------------


def test_lines_are_short() -> None:
    for name, content in OWN.items():
        lines = content.decode().splitlines()
        assert max(map(len, lines)) <= 100, name


def test_nothing_is_loaded_from_elsewhere() -> None:
    for name, content in OWN.items():
        addresses = re.findall(
            r"(?:https?:)?//[\w.-]+\.\w+", re.sub(r"(?m)^\s*//.*", "", content.decode())
        )
        assert [each for each in addresses if each != "http://www.w3.org"] == [], name


def test_the_page_knows_why_a_prompt_left_the_cache() -> None:
    table = OWN["words.js"].decode().partition("const WHY = {")[2].partition("}")[0]
    known = {a or b for a, b in re.findall(r'(?m)^  (?:(\w+)|"([\w ]+)"): "', table)}
    assert known == set(WHY) - {"end"}  # then all was found that could be


def test_libraries_are_as_they_were_published() -> None:
    """``tools/page_libraries.py`` compares the same hashes with the packages themselves."""
    files = page_files()
    pinned = {f"vendor/{file.name}": file.sha256 for each in LIBRARIES for file in each.files}
    assert {name for name in files if name.startswith("vendor/")} == set(pinned)
    for name, sha256 in pinned.items():
        assert hashlib.sha256(files[name][0]).hexdigest() == sha256, name
