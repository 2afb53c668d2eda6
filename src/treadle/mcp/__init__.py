"""Tools of the Model Context Protocol (MCP) servers that a file lists: ``--mcp FILE``.

::

    config.py       reads the file: ToolServerConfig for each server; ToolBounds
    toolbox.py      Toolbox: runs the servers, and calls their tools within limits of time and size
    session.py      ToolSession: the interface of a connection to one server
    client.py       connections by the ``mcp`` package
    process.py      the process of a server that is used through stdin and stdout
    http_bounds.py  a size limit for the HTTP responses of a server
    results.py      converts a tool's result to text for the model
"""
