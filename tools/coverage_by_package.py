"""Print the line coverage of each package of treadle, lowest first: ``make coverage``.

Usage: ``python tools/coverage_by_package.py [--floor PERCENT] [--files] [DATA]``

``DATA`` is a file that ``coverage`` wrote (default ``.coverage``). Modules that no test imports
count with all of their lines. The exit status is 1 where a package is below the floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "treadle"


class Lines(NamedTuple):
    """Lines of a file or a package that a run can reach, and how many of them ran."""

    name: str
    n_lines: int
    n_run: int

    @property
    def percent(self) -> float:
        return 100 * self.n_run / self.n_lines if self.n_lines else 100.0


def package_of(name: str) -> str:
    """``jit`` of ``jit/values.py``; ``.`` of a module beside the packages."""
    first, _, rest = name.partition("/")
    return first if rest else "."


def by_package(files: list[Lines]) -> list[Lines]:
    """Files summed by package, the lowest percentage first."""
    names = {package_of(each.name) for each in files}
    sums = [
        Lines(
            name,
            sum(each.n_lines for each in files if package_of(each.name) == name),
            sum(each.n_run for each in files if package_of(each.name) == name),
        )
        for name in names
    ]
    return sorted(sums, key=lambda each: (each.percent, each.name))


def read(data: Path) -> Iterator[Lines]:
    """The lines of each file of the package, from what ``coverage`` wrote."""
    from coverage import Coverage

    coverage = Coverage(data_file=str(data))
    coverage.load()
    for path in sorted(PACKAGE.rglob("*.py")):
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        name = path.relative_to(PACKAGE).as_posix()
        yield Lines(name, len(statements), len(statements) - len(missing))


def table(rows: list[Lines]) -> str:
    return "\n".join(f"{each.percent:6.1f} % {each.n_lines:7d} lines  {each.name}" for each in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", nargs="?", type=Path, default=Path(".coverage"))
    parser.add_argument("--floor", type=float, default=0.0, help="the least percentage allowed")
    parser.add_argument("--files", action="store_true", help="each file too, the lowest first")
    args = parser.parse_args()
    files = list(read(args.data))
    if args.files:
        print(table(sorted(files, key=lambda each: (each.percent, each.name))), end="\n\n")
    packages = by_package(files)
    print(table(packages))
    low = [each.name for each in packages if each.percent < args.floor]
    if low:
        raise SystemExit(f"below {args.floor:g} %: {', '.join(low)}")


if __name__ == "__main__":
    main()
