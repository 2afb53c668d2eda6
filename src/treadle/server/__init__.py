"""``treadle serve``: one model over HTTP, for every client that speaks a known protocol.

::

    app.py            paths to handlers; what every call goes through serve.py          the process:
    socket, ready line, signals server/http/connection.py     how long a client is waited for, and
    how many there may be server/requests/service.py        what handlers share: the model, the
    engine's thread, the pool, limits server/requests/engine_thread.py  the one thread that steps
    the scheduler server/requests/request_stream.py           the texts of one HTTP call, as they
    grow server/http/body_fields.py         a body's fields, read by tables
    server/requests/generation_request.py          from a body to requests: settings that all
    protocols share server/requests/chat_prompt.py   from messages to ids server/http/http_io.py
    bodies in, JSON and events out, clients that leave static.py         the page: files in page/,
    which a browser runs openai_*.py server/protocols/llamacpp.py ...  a file for each family of
    endpoints

Nothing here is imported before ``treadle serve`` asks for it. Starlette and uvicorn come with the
extra ``[serve]``.
"""
