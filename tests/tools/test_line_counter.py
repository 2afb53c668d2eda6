"""Statements that run are noted by line, in every process and however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tools.count_lines import line_counter
from tools.count_lines.line_counter import VARIABLE, prepare, ran, statements

ROOT = Path(__file__).resolve().parents[2]
# What runs is marked with +, what could and does not with -; the rest is not counted. A row of
# statements that an exception leaves counts as not run.
MARKED = '''
  """A docstring."""

  from __future__ import annotations

+ import os
+ import signal
+ from typing import TYPE_CHECKING, overload

  if TYPE_CHECKING:
      from pathlib import Path
  else:
+     Path = int

  @overload
  def f(x: int) -> int: ...
  @overload
  def f(x: str) -> str: ...
+ def f(x):
      """Another."""
      global found
+     try:
+         if x > 1:
-             return 1
+         elif x == 1:
+             found = (
                  __doc__, f.__doc__
              )
+         match x:
              case 0:
+                 raise ValueError
              case 7:
-                 pass
      except ValueError:
+         for _ in ():
-             x = 2
          else:
+             x = 3
      finally:
+         with open(os.devnull):
+             x = 4
+     return x

+ class C:
+     y = 1

+     def g(self) -> int:
+         return 5

+     def h(self) -> int: ...

+ def left():
-     x = 1
-     x += len(5)
-     return x

+ def left_at_a_yield():
+     x = 1
+     x = yield x
-     yield x

+ next(left_at_a_yield())
+ try:
+     left()
  except TypeError:
+     pass

+ async def nothing() -> None:
-     await nothing()

+ f(1)
+ f(0)
+ print(found)
+ if not os.fork():
+     os._exit(C().g())
+ assert os.wait()[1] >> 8 == 5
+ if found:
+     x = 1
+     x += len(
          found
      )
+     os.kill(os.getpid(), signal.SIGKILL)
- print("not reached")
'''


def test_what_ran_is_noted(tmp_path: Path) -> None:
    """Of a process that is killed, and of a child that it forked."""
    marked = MARKED.splitlines()[1:]
    source = "\n".join(line[2:] for line in marked) + "\n"
    sources = tmp_path / "src" / "treadle"
    sources.mkdir(parents=True)
    (sources / "__init__.py").write_text("")
    (sources / "a.py").write_text("x = 1")
    (sources / "b.py").write_text(source)
    folder = tmp_path / "lines"
    prepare(folder, sources)
    script = (
        "import line_counter, sys; line_counter.start(sys.argv[1], sys.argv[2]);import treadle.b"
    )
    path = os.pathsep.join([str(Path(line_counter.__file__).parent), str(sources.parent)])
    for _ in range(2):  # the second loads what the first compiled
        done = subprocess.run(
            [sys.executable, "-c", script, str(folder), f"{sources}{os.sep}"],
            env={"PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert done.stdout in ("", "('A docstring.', 'Another.')\n")
    assert (folder / "treadle.b.code").is_file()
    found = {name: (counted, lines) for name, counted, lines in ran(folder, sources)}
    counted = {i for i, line in enumerate(marked, 1) if line[:1] in ("+", "-")}
    noted = {i for i, line in enumerate(marked, 1) if line.startswith("+")}
    assert found == {"__init__.py": (set(), set()), "a.py": ({1}, set()), "b.py": (counted, noted)}


def test_a_python_counts_where_it_is_asked(tmp_path: Path) -> None:
    prepare(tmp_path / "lines", ROOT / "src" / "treadle")
    tools = ROOT / "tools" / "count_lines"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tools), str(ROOT / "src")]),
        VARIABLE: str(tmp_path / "lines"),
    }
    subprocess.run([sys.executable, "-m", "treadle", "--version"], env=environment, check=True)
    found = {name: lines for name, _, lines in ran(tmp_path / "lines", ROOT / "src" / "treadle")}
    assert found["__main__.py"] == statements((ROOT / "src/treadle/__main__.py").read_bytes())
    assert not found["jit/compile.py"]
