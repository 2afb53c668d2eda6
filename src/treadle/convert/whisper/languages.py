"""The languages of Whisper's vocabulary, in the order of their tokens."""

from __future__ import annotations

LANGUAGES = (
    *("en", "zh", "de", "es", "ru", "ko", "fr", "ja", "pt", "tr", "pl", "ca", "nl", "ar", "sv"),
    *("it", "id", "hi", "fi", "vi", "he", "uk", "el", "ms", "cs", "ro", "da", "hu", "ta", "no"),
    *("th", "ur", "hr", "bg", "lt", "la", "mi", "ml", "cy", "sk", "te", "fa", "lv", "bn", "sr"),
    *("az", "sl", "kn", "et", "mk", "br", "eu", "is", "hy", "ne", "mn", "bs", "kk", "sq", "sw"),
    *("gl", "mr", "pa", "si", "km", "sn", "yo", "so", "af", "oc", "ka", "be", "tg", "sd", "gu"),
    *("am", "yi", "lo", "uz", "fo", "ht", "ps", "tk", "nn", "mt", "sa", "lb", "my", "bo", "tl"),
    *("mg", "as", "tt", "haw", "ln", "ha", "ba", "jw", "su", "yue"),
)
N_TIMESTAMPS = 1501  # 0.00 to 30.00 s
N_TEXT = 50257  # text tokens of the multilingual vocabularies
N_TEXT_ENGLISH = 50256  # of the English-only vocabulary, which is GPT-2's


def special_names(n_vocab: int) -> list[str]:
    """Return the names of the special tokens that follow the text tokens of a Whisper vocabulary of
    ``n_vocab`` tokens; [] for another size.

    The English-only vocabulary has 51864 tokens, that of 99 languages 51865, that of large-v3 with
    100 languages 51866.
    """
    n_text = N_TEXT_ENGLISH if n_vocab == N_TEXT_ENGLISH + 1608 else N_TEXT
    n_languages = n_vocab - n_text - N_TIMESTAMPS - 8
    if n_languages not in (len(LANGUAGES) - 1, len(LANGUAGES)):
        return []
    return [
        "<|endoftext|>",
        "<|startoftranscript|>",
        *(f"<|{code}|>" for code in LANGUAGES[:n_languages]),
        *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"),
        *("<|nospeech|>", "<|notimestamps|>"),
        *map(timestamp_name, range(N_TIMESTAMPS)),
    ]


def timestamp_name(i: int) -> str:
    """Return the name of the ``i``-th timestamp token, of the time ``i`` x 0.02 s."""
    return f"<|{i * 0.02:.2f}|>"
