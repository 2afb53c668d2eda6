"""Terminal input and output of the commands.

::

    table.py      tables, lines, JSON, numbers; output that is safe for a terminal
    progress.py   progress bar on standard error
    screen.py     output of an answer: exact text, wrapped words, or Markdown
    wrap.py       streaming word wrap
    markdown.py   streaming Markdown
    terminal.py   input of a chat: editor on a terminal, lines of a pipe
    svg.py        SVG charts: frame, axes, markers, labels
"""
