"""Print the line coverage of each package of treadle, lowest first: ``make coverage``.

Usage: ``python -m tools.coverage_by_package [--floor PERCENT] [--files] [--missing] FOLDER``, from
the project's folder. ``--prepare FOLDER`` makes the folder before the run.

``FOLDER`` holds what ``tools/count_lines/line_counter.py`` counted. Modules that no test imports
count with all of their lines. The exit status is 1 where a package is below the floor.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.count_lines import line_counter

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


def read(folder: Path) -> Iterator[tuple[Lines, list[int]]]:
    """Each file of the package, and the lines that did not run."""
    for name, counted, ran in line_counter.ran(folder, PACKAGE):
        yield Lines(name, len(counted), len(ran)), sorted(counted - ran)


def table(rows: list[Lines]) -> str:
    return "\n".join(f"{each.percent:6.1f} % {each.n_lines:7d} lines  {each.name}" for each in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", action="store_true", help="make the folder, and end")
    parser.add_argument("--floor", type=float, default=0.0, help="the least percentage allowed")
    parser.add_argument("--files", action="store_true", help="each file too, the lowest first")
    parser.add_argument("--missing", action="store_true", help="with the lines that did not run")
    args = parser.parse_args()
    if args.prepare:
        line_counter.prepare(args.folder, PACKAGE)
        return
    found = list(read(args.folder))
    files = [each for each, _ in found]
    if args.missing:
        for each, missing in found:
            print(each.name, *missing)
    if args.files:
        print(table(sorted(files, key=lambda each: (each.percent, each.name))), end="\n\n")
    packages = by_package(files)
    print(table(packages))
    low = [each.name for each in packages if each.percent < args.floor]
    if low:
        raise SystemExit(f"below {args.floor:g} %: {', '.join(low)}")


if __name__ == "__main__":
    main()
