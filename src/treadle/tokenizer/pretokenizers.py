"""Pre-tokenizers of BPE families (GGUF's ``tokenizer.ggml.pre``): rules that split text into words.

A row is one family: its regular expressions, applied one after another, each to what the earlier
ones left unsplit. The expressions are those of the families' own tokenizer.json.
"""

from __future__ import annotations

from dataclasses import replace

from treadle.base.fast_classes import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """Rules that split text into words, for one family of vocabularies.

    ``patterns``: regular expressions; each match and each gap between matches becomes a word.
    ``ignore_merges``: a word that is a piece becomes that piece, regardless of the merges.
    ``add_bos``, ``add_sep``: defaults for GGUF files of the family that do not state them.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt4(digits: str, letters: str = r"\p{L}", marks: str = "") -> str:
    """Return the GPT-4 expression. ``digits`` is an expression of a word of digits, ``letters`` one
    of a letter; ``marks``, in the syntax of a set: characters besides letters and digits that do
    not count as punctuation.
    """
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}"
        rf"| ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(digits: str, suffix: str, but: str = "", end: str = r"[\r\n/]*") -> str:
    """Return the GPT-4o expression, whose words are capitals, then small letters.

    These are expressions: ``digits`` of a word of digits, ``suffix`` of the end of a word, ``end``
    of the characters after punctuation. ``but``, in the syntax of a set, excludes letters.
    """
    upper, lower = (rf"[\p{{{x}}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]" for x in (r"Lu}\p{Lt", "Ll"))
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{suffix}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{end}|{_SPACES}"
    )


# The cased letters as DeepSeek's tokenizer lists them.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    r"\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    r"\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    r"\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    r"\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    r"\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    r"\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    r"\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    r"\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    r"\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    r"\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\x{10400}-\x{1044f}"
    r"\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}"
)
_DEEPSEEK_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|`]+"

_LLAMA3 = _gpt4(r"\p{N}{1,3}")
_QWEN2 = PreTokenizer((_gpt4(r"\p{N}"),))
_RUNS = "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))  # runs of spaces
_JAIS2 = PreTokenizer((_LLAMA3.removesuffix(r"|\s+(?!\S)|\s+") + _RUNS + r"|\s{1,2}(?!\S)|\s{1}",))
_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_GPT_2 = PreTokenizer((_GPT2,))
_ONE_DIGIT = PreTokenizer((r"\p{N}", _GPT2))
_BLOOM = PreTokenizer((" ?[^(\\s|.,!?…。，、।۔،)]+",))
_TEKKEN = PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, add_bos=True)
_GPT_4O = PreTokenizer((_cased(r"\p{N}{1,3}", f"{_CONTRACTION}?"),))
_HAN = _cased(r"\p{N}{1,3}", f"{_CONTRACTION}?", r"&&[^\p{Han}]", r"[\r\n]*")
# Digits in threes from the right, unless a letter follows. The leading ones are cut off; then
# groups from the left are the same. The family's own expression, \d{1,3}(?=(?:\d{3})*\b), makes the
# same cuts, but scans to the end for each group.
_TINY_AYA = PreTokenizer((r"(?<!\d)\d{1,3}(?=(?:\d{3})*+\b)", *_GPT_4O.patterns))
_DEEPSEEK_V3 = PreTokenizer(
    (
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
    )
)

_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

# NanoChat's ranks contain whole words, as tiktoken looks them up.
_TWOS = _BAILING.patterns[0].replace(r"\p{N}|", r"\p{N}{1,2}|")
_NANOCHAT = PreTokenizer((_TWOS,), ignore_merges=True)

# Digits in threes from the right. Longer runs are cut first, otherwise each digit scans to the end.
_TRINITY = PreTokenizer(
    (
        r"\p{N}{1,510}",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
        r"\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK_V3.patterns[2],
    )
)

# SuperBPE: digits in threes from the right; other numbers (such as superscripts) are not cut off.
# SuperBPE's expression, (?=(\d{3})+(?!\d)), makes the same cuts, but each digit scans to the end.
_OTHER = r"[\p{N}&&\D]"
_HEAD = r"\d{1,2}(?=(?:\d{3})+(?!\d))"
_SUPERBPE = PreTokenizer(
    (
        r"\p{N}+",
        rf"(?<!\d){_HEAD}|\d{{3}}(?=\d)"
        rf"|(?:\d{{1,3}}(?!\d))?(?:{_OTHER}++(?:\d{{1,2}}(?!\d))?)+(?:{_HEAD})?",
    )
)

DEFAULT = "default"
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    DEFAULT: PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    # Llama 3 and families that use its tokenizer
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama-bpe": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "falcon-h1": _LLAMA_BPE,
    "pixtral": _LLAMA_BPE,
    "lfm2": _LLAMA_BPE,
    "jina-v5-nano": _LLAMA_BPE,
    "midm-2.0": _LLAMA_BPE,
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "dbrx": PreTokenizer((_LLAMA3,)),
    "glm4": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "chatglm-bpe": PreTokenizer((_LLAMA3,)),
    # Qwen
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "stablelm2": _QWEN2,
    "hunyuan": _QWEN2,
    "solar-open": _QWEN2,
    "megrez": _QWEN2,
    "kormo": _QWEN2,
    "f2llmv2": _QWEN2,
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _gpt4(r"\p{N}"))),
    "qwen35": PreTokenizer((_gpt4(r"\p{N}", r"[\p{L}\p{M}]", r"\p{M}"),)),
    # Mistral
    "tekken": _TEKKEN,
    # GPT-2
    "gpt-2": _GPT_2,
    "phi-2": _GPT_2,
    "mpt": _GPT_2,
    "olmo": _GPT_2,
    "jais": _GPT_2,
    "jais-2": _JAIS2,
    "exaone4": _GPT_2,
    "mellum": _GPT_2,
    "gigachat": _GPT_2,
    "a.x-4.0": _GPT_2,
    "trillion": _GPT_2,
    "granite-docling": _GPT_2,
    "modern-bert": _GPT_2,
    "jina-es": _GPT_2,
    "jina-de": _GPT_2,
    "jina-v2-es": _GPT_2,
    "jina-v2-de": _GPT_2,
    "jina-v1-en": PreTokenizer((_GPT2,), add_sep=True),
    "jina-v2-code": PreTokenizer((_GPT2,), add_sep=True),
    "roberta-bpe": PreTokenizer((_GPT2,), add_sep=True),
    # GPT-2 with every digit a word
    "starcoder": _ONE_DIGIT,
    "refact": _ONE_DIGIT,
    "command-r": _ONE_DIGIT,
    "smollm": _ONE_DIGIT,
    "codeshell": _ONE_DIGIT,
    "exaone": _ONE_DIGIT,
    "minerva-7b": _ONE_DIGIT,
    "mellum2": _ONE_DIGIT,
    # GPT-4o
    "gpt-4o": _GPT_4O,
    "llama4": _GPT_4O,
    "kanana2": _GPT_4O,
    "minimax-m2": _GPT_4O,
    "granite-embed-multi-97m": replace(_GPT_4O, ignore_merges=True),
    # BLOOM
    "bloom": _BLOOM,
    "poro-chat": _BLOOM,
    "gpt3-finnish": _BLOOM,
    "viking": PreTokenizer((*_BLOOM.patterns, r"\p{N}")),
    # the others
    "falcon": PreTokenizer((_PUNCTUATION, _GPT2, "[0-9][0-9][0-9]")),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "hunyuan-dense": _DEEPSEEK_V3,
    "joyai-llm": _DEEPSEEK_V3,
    # Kimi: Han apart from other letters. Its ranks contain whole words, as tiktoken looks them up.
    "kimi-k2": PreTokenizer((rf"[\p{{Han}}]+|{_HAN}",), ignore_merges=True),
    # Ling and Ring
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "nanochat": _NANOCHAT,
    "afmoe": _TRINITY,
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _gpt4(r"\p{N}+")), ignore_merges=True),
    # Signs are kept apart from newlines
    "seed-coder": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
            rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
        )
    ),
    # Youtu
    "youtu": PreTokenizer(
        (
            r"[\uac00-\ud7a3\u3131-\u318e]+"
            r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            r"|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
            _cased(r"\p{N}", f"{_CONTRACTION}?"),
        ),
        ignore_merges=True,
    ),
    # Cohere 2 with experts
    "cohere2moe": _TINY_AYA,
    "tiny_aya": _TINY_AYA,
    # K-EXAONE: words with single spaces between them are one
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    # GLM 5, Hy 4, Grok 2, Talkie, Inkling, LLaDA with experts
    "glm5": PreTokenizer((_LLAMA3,), ignore_merges=True),
    "hy_v4": _DEEPSEEK_V3,
    "grok-2": _QWEN2,
    "talkie": _GPT_4O,
    "inkling": _GPT_4O,
    "llada-moe": _BAILING,
    # Ufakzeka: Qwen's, with no English contractions, so that Turkish suffixes stay whole
    "ufakzeka": PreTokenizer((_gpt4(r"\p{N}").removeprefix(f"{_CONTRACTION}|"),)),
    # Spark 2.5: each end of a line, and of a run of spaces before one, is a word
    "spark2_5": PreTokenizer(
        (
            *_DEEPSEEK_V3.patterns[:2],
            _DEEPSEEK_V3.patterns[2].replace(rf"[\r\n]*|{_SPACES}", r"|[\r\n]|\s+(?!\S)|\s+"),
            r"\p{N}",
        )
    ),
    # Chameleon: each sign is a word; image placeholders stay whole
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "superbpe": _SUPERBPE,
}

# Files older than the key ``tokenizer.ggml.pre``: guesses from the architecture or a piece.
PRE_OF_ARCH = {
    **dict.fromkeys(("qwen", "qwen2", "qwen2moe", "qwen3"), "qwen2"),
    **dict.fromkeys(("gpt2", "phi2", "gptneox", "mpt", "olmo"), "gpt-2"),
    **{name: name for name in ("falcon", "starcoder", "refact", "bloom")},
}
PRE_OF_PIECE = {b"<|begin_of_text|>": "llama-bpe", b"<|im_start|>": "qwen2"}
