"""``Treadle``: language models of treadle in LlamaIndex, in the same process.

::

    base.py       Treadle, the LLM
    messages.py   LlamaIndex's messages from and to OpenAI's form, which treadle takes
"""

from llama_index.llms.treadle.base import Treadle

__all__ = ["Treadle"]
