"""Third-party coding agents, started with a server of this machine as their model: ``treadle
launch``.

::

    table.py     the agents, and a function for each that makes its settings
    settings.py  Endpoint, AgentSettings (variables, arguments, files), Agent; the shell script
    server.py    AgentServer: ``treadle serve`` as a child process; its context length
    process.py   finds and runs an agent's program, and relays signals to it
"""
