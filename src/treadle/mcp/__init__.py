"""Tools of Model Context Protocol (MCP) servers, which a file names: ``--mcp FILE``.

``config`` reads the file, ``toolbox`` keeps the servers and calls their tools within bounds of time
and size, ``client`` is the connection to one server by the ``mcp`` package, ``process`` the process
of a server that speaks on its standard input and output.
"""
