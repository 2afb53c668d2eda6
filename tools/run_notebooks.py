"""Run notebooks, each in a kernel of its own, and write them with their outputs.

python tools/run_notebooks.py notebooks/*.ipynb                # in place, as `make notebooks` does
python tools/run_notebooks.py --to FOLDER notebooks/1-*.ipynb  # the tests: the originals stay

It needs the extra ``notebooks``. What differs from run to run without a reason is left out of the
files: times of execution, versions of Python, colours of a terminal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

TIMEOUT_S = 300  # of a cell
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def run(path: Path, to: Path) -> None:
    """Run a notebook in its own folder; write it to ``to``. Raises CellExecutionError, with the
    cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute()
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    nbformat.write(notebook, to)


def joined(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Return a cell's outputs without metadata; texts of one stream that follow each other are one.
    How many they are depends on how busy the machine was.
    """
    found: list[NotebookNode] = []
    for output in outputs:
        output.pop("transient", None)
        if "metadata" in output:
            output["metadata"] = {}
        last = found[-1] if found else {}
        if output.output_type == "stream" and last.get("name") == output.name:
            last["text"] += output.text
        else:
            found.append(output)
    return found


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--to", type=Path, help="folder of the results; by default, in place")
    given = parser.parse_args(words)
    for path in given.notebooks:
        print(path, flush=True)
        try:
            run(path, given.to / path.name if given.to else path)
        except CellExecutionError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
