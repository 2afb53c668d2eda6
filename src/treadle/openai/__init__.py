"""OpenAI's client with a model of this process behind it: no server, no socket.

::

    import treadle.openai

    client = treadle.openai.OpenAI("model.gguf")
    answer = client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": "Name a colour."}]
    )

The clients are those of the ``openai`` package, whose HTTP client is replaced by one that calls the
endpoints of ``treadle serve`` directly. So answers are those of the server, and all that is built
on the package works: ``parse``, ``stream``, ``with_raw_response``, retries, ``instructor``.

::

    client.py      OpenAI, AsyncOpenAI, http_client, async_http_client
    transport.py   an HTTP client's transport that hands requests to a service
    in_process.py  the service of a model, on an event loop of its own thread

The ``openai`` package is needed (``pip install "treadle[openai]"``), Starlette and uvicorn are not.
"""

from treadle.openai.client import AsyncOpenAI, OpenAI, async_http_client, http_client

__all__ = ["AsyncOpenAI", "OpenAI", "async_http_client", "http_client"]
