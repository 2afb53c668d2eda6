"""HTTP layer: bodies, errors, connections and the log.

::

    http_io.py      reads bodies; JSON responses and server-sent events; client disconnects
    body_fields.py  readers of body fields, row by row of a table
    json_pieces.py  a JSON parser for huge bodies that does not hold the GIL
    multipart.py    bodies of multipart/form-data
    api_errors.py   ``ApiError``: a status and OpenAI's error object
    api_keys.py     API keys, their limits, and the use of each
    connection.py   one client connection: timeouts, the limit on open ones
    listeners.py    listening TCP and UNIX sockets
    tls.py          certificate and private key, read again when they change
    file_watch.py   whether a file has changed
    path_prefix.py  a prefix before all paths, behind a proxy
    redaction.py    folder names, removed from messages
    log.py          the log: JSON lines on standard error
"""
