"""KV pages and sessions in files.

::

    folder.py        Folder: a directory of small files with a size limit, least recently used
    page_store.py    PageStore: full pages as files, a prefix cache that outlives the process
    session_file.py  a session's tokens, keys and values as one safetensors file
"""
