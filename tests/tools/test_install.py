"""uv is told what pip is set up for."""

from __future__ import annotations

from tools.install import uv_options

BEST = ["--index-strategy", "unsafe-best-match"]


def test_settings_of_pip_are_uvs_options() -> None:
    settings = (
        ":env:.find-links='/elsewhere'\n"
        "global.cert='/etc/ssl/ca.crt'\n"
        "global.constraint='/etc/limits.txt'\n"
        "global.extra-index-url='file:///one file:///two'\n"
        "install.find-links='/wheels'\n"
    )
    assert uv_options(settings, {"PIP_FIND_LINKS": "/wheels /more", "PIP_TIMEOUT": "9"}) == [
        *("--extra-index-url", "file:///one", "--extra-index-url", "file:///two"),
        *("--find-links", "/wheels", "--find-links", "/more"),
        *("--constraints", "/etc/limits.txt"),
        *BEST,
    ]


def test_a_variable_stands_above_a_file_and_install_above_global() -> None:
    settings = "global.index-url='https://one'\ninstall.index-url='https://two'\n"
    assert uv_options(settings, {}) == ["--index-url", "https://two", *BEST]
    variables = {"PIP_INDEX_URL": "https://three"}
    assert uv_options(settings, variables) == ["--index-url", "https://three", *BEST]


def test_no_registry() -> None:
    assert uv_options("global.no-index='true'\n", {}) == ["--no-index", *BEST]
    assert uv_options("global.no-index='false'\n", {}) == BEST


def test_pip_without_settings() -> None:
    assert uv_options("", {}) == BEST
