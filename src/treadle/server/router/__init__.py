"""The router of ``treadle serve``: several models behind one address, one engine process each.

::

    served_model.py    a model that may be loaded: name, aliases, options of its engine
    model_list.py      all of them, from the command line, presets, folders and the library; by name
    engine.py          the engine's side: one model served at a private socket, reports of its load
    engine_app.py      the engine's ASGI application
    launcher.py        the router's side: engines forked from a warm process, or started as new ones
    spawner.py         the warm process: everything is imported once, engines are forked from it
    engine_turns.py    engines that compute at the same time take turns, step by step
    memory_need.py     the memory that a model's engine may take
    pool.py            loads, unloads, counts of running calls, memory
    service.py         state shared by the router's handlers
    engine_client.py   HTTP to an engine's socket
    forwarding.py      a call from a client to an engine and back
    kept_streams.py    streams that outlive their connection, looked up among the engines
    listings.py        models as each protocol lists them
    endpoints.py       endpoints that the router answers itself
    library.py         models that clients of the router download, remove and copy
    merged_metrics.py  /metrics of all engines
    app.py             routes
    serve.py           the router's process

The router computes nothing of a model, and no model is loaded in its process.
"""
