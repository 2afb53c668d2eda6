"""``python -m tests.cli.jobs COMMAND``: a shell with one job, for tests of a pseudo-terminal.

Runs the command in front. When it stops or ends, says so and how the terminal was left; a line from
the terminal makes it go on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import termios


def terminal() -> str:
    """How the terminal is set up: its marks for typed keys that are shown, and lines."""
    mode = termios.tcgetattr(0)[3]
    return f"echo={bool(mode & termios.ECHO)} lines={bool(mode & termios.ICANON)}"


def main() -> None:
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # so that the terminal can be taken back
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    usual = termios.tcgetattr(0)
    job = subprocess.Popen(sys.argv[1:], preexec_fn=os.setpgrp)
    os.tcsetpgrp(0, job.pid)
    while True:
        _, status = os.waitpid(job.pid, os.WUNTRACED)
        os.tcsetpgrp(0, os.getpgrp())
        if not os.WIFSTOPPED(status):
            print(f"\nENDED {os.waitstatus_to_exitcode(status)} {terminal()}", flush=True)
            job.returncode = 0
            return
        print(f"\nSTOPPED {terminal()}", flush=True)
        termios.tcsetattr(0, termios.TCSANOW, usual)
        sys.stdin.readline()
        os.tcsetpgrp(0, job.pid)
        os.killpg(job.pid, signal.SIGCONT)


if __name__ == "__main__":
    main()
