"""Lines of files are summed by package, the worst first."""

from __future__ import annotations

from tools.coverage_by_package import Lines, by_package, table


def test_files_are_summed_by_package() -> None:
    files = [
        Lines("jit/values.py", 10, 9),
        Lines("jit/a/b.py", 30, 3),
        Lines("errors.py", 5, 5),
        Lines("hub/__init__.py", 0, 0),
        Lines("base/x.py", 4, 1),
    ]
    packages = by_package(files)
    assert packages == [
        Lines("base", 4, 1),
        Lines("jit", 40, 12),
        Lines(".", 5, 5),
        Lines("hub", 0, 0),
    ]
    assert [each.percent for each in packages] == [25.0, 30.0, 100.0, 100.0]
    assert table(packages[:1]) == "  25.0 %       4 lines  base"
