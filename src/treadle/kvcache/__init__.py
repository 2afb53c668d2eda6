"""Keys and values of all sequences, in pages that sequences with one prefix share."""
