"""Coding agents of others, started on a server of this machine: ``treadle launch``.

``table`` has a row for each agent, ``settings`` what it is given, ``server`` the server that is
started for it, ``process`` the running agent.
"""
