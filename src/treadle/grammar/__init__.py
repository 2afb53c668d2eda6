"""Grammars that an answer must follow: GBNF, Lark, JSON schema and regular expressions."""
