"""A small MCP server on standard input and output, by the ``mcp`` package."""

from __future__ import annotations

import os
import sys


def main() -> None:
    from mcp.server import MCPServer

    server = MCPServer("small")

    def add(a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)

    def variable(name: str) -> str:
        """Return a variable of the server's environment."""
        return os.environ.get(name, "none")

    def end() -> str:
        """End the server."""
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(3)

    def flood(n: int) -> str:
        """Return so many characters."""
        return "x" * n

    def refuse() -> str:
        """Fail."""
        raise ValueError("not today")

    for function in (add, variable, end, flood, refuse):
        server.tool()(function)
    transport = sys.argv[1] if len(sys.argv) > 1 else "stdio"
    if transport == "http":
        server.run(transport="streamable-http", port=int(sys.argv[2]))
    else:
        server.run(transport="stdio")


if __name__ == "__main__":
    main()
