"""``treadle batch``: files of requests, one a line, to files of answers."""
