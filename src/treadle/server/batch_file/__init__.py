"""Files of requests, a line each, to files of answers: ``treadle batch``."""
