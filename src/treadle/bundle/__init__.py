"""Program and model in one file: ``treadle bundle``. ``files/bundled.py`` has the file's layout."""
