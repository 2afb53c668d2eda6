"""treadle's models in LangChain, in the same process.

::

    settings.py     what all classes take: a model, settings of its load and of its answers
    chat.py         ChatTreadle, a chat model
    messages.py     LangChain's messages from and to OpenAI's form, which treadle takes
    completion.py   TreadleLLM, a model that continues a text
    embeddings.py   TreadleEmbeddings
    reranker.py     TreadleReranker, a document compressor
"""

from langchain_treadle.chat import ChatTreadle
from langchain_treadle.completion import TreadleLLM
from langchain_treadle.embeddings import TreadleEmbeddings
from langchain_treadle.reranker import TreadleReranker

__all__ = ["ChatTreadle", "TreadleEmbeddings", "TreadleLLM", "TreadleReranker"]
