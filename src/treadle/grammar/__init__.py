"""Grammars that an answer must follow: GBNF, Lark, JSON schema and regular expressions.

::

                          -- compiling and matching --
    grammar.py            Grammar, and Matcher: an answer's state in it
    compiled_cache.py     cache of compiled grammars
    async_mask.py         computes token masks in a background thread
    token_bytes.py        a tokenizer's vocabulary for llguidance
                          -- from GBNF to llguidance's Lark notation --
    gbnf.py               parser of GBNF
    rule_graph.py         which rules refer to which; recursion
    char_classes.py       sets of characters as bit masks
    regex.py              regular expressions, stored once each
    automaton.py          rules as finite automata
    lexemes.py            splits rules into the longest safe lexemes
    lark.py               writer of Lark grammars
                          -- JSON schemas, made stricter --
    json_schema.py        rewrites a schema into one that llguidance enforces
    schema_closed.py      objects that may have only the keys that the schema names
    schema_impossible.py  parts that allow no value
    llguidance_limits.py  schemas that llguidance would misread or crash on
    json_numbers.py       JSON whose numbers llguidance reads exactly
"""
