"""OpenAI's package talks with treadle: start `treadle serve`, then

python examples/openai_client.py URL
"""

from __future__ import annotations

import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
stream = client.chat.completions.create(
    model="any",
    messages=[{"role": "user", "content": "Name a colour."}],
    max_tokens=16,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

colour = client.chat.completions.create(
    model="any",
    messages=[{"role": "user", "content": "Name a colour."}],
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "colour", "schema": {"enum": ["red", "green", "blue"]}},
    },
)
print(colour.choices[0].message.content)
