"""``treadle serve``: models over HTTP, for every client that speaks a known protocol.

::

    app.py            routes; middleware that every HTTP request passes
    openai_routes.py  OpenAI's endpoints by path, for app.py and for ``treadle.openai``
    serve.py          the server process: socket, ready line, signals
    static.py         the web page: files in page/, which a browser runs
    http/             connections, bodies in, JSON and events out, API keys, API errors, the log
    requests/         from a body to generation requests; the engine thread; output streams and
                      their responses
    protocols/        a file or folder for each family of endpoints
    router/           several models, one engine process each
    speech/           the server of a speech model: transcriptions
    batch_file/       ``treadle batch``: files of requests

``docs/flow.md`` ("Requests over HTTP") follows a chat request through these files.

Nothing here is imported before ``treadle serve``, ``treadle batch`` or ``treadle.openai`` needs it.
Starlette and uvicorn come with the extra ``[serve]``.
"""
