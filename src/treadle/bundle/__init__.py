"""``treadle bundle``: program and model in one file. ``files/bundled.py`` has the layout."""
