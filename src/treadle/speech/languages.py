"""Languages of Whisper's multilingual models: the codes in their tokens, and English names.

Source: the ``<|en|>`` tokens of the published vocabularies; large-v3 has Cantonese (``yue``) too.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from treadle.errors import TreadleError

LANGUAGES = {
    "en": "english",
    "zh": "chinese",
    "de": "german",
    "es": "spanish",
    "ru": "russian",
    "ko": "korean",
    "fr": "french",
    "ja": "japanese",
    "pt": "portuguese",
    "tr": "turkish",
    "pl": "polish",
    "ca": "catalan",
    "nl": "dutch",
    "ar": "arabic",
    "sv": "swedish",
    "it": "italian",
    "id": "indonesian",
    "hi": "hindi",
    "fi": "finnish",
    "vi": "vietnamese",
    "he": "hebrew",
    "uk": "ukrainian",
    "el": "greek",
    "ms": "malay",
    "cs": "czech",
    "ro": "romanian",
    "da": "danish",
    "hu": "hungarian",
    "ta": "tamil",
    "no": "norwegian",
    "th": "thai",
    "ur": "urdu",
    "hr": "croatian",
    "bg": "bulgarian",
    "lt": "lithuanian",
    "la": "latin",
    "mi": "maori",
    "ml": "malayalam",
    "cy": "welsh",
    "sk": "slovak",
    "te": "telugu",
    "fa": "persian",
    "lv": "latvian",
    "bn": "bengali",
    "sr": "serbian",
    "az": "azerbaijani",
    "sl": "slovenian",
    "kn": "kannada",
    "et": "estonian",
    "mk": "macedonian",
    "br": "breton",
    "eu": "basque",
    "is": "icelandic",
    "hy": "armenian",
    "ne": "nepali",
    "mn": "mongolian",
    "bs": "bosnian",
    "kk": "kazakh",
    "sq": "albanian",
    "sw": "swahili",
    "gl": "galician",
    "mr": "marathi",
    "pa": "punjabi",
    "si": "sinhala",
    "km": "khmer",
    "sn": "shona",
    "yo": "yoruba",
    "so": "somali",
    "af": "afrikaans",
    "oc": "occitan",
    "ka": "georgian",
    "be": "belarusian",
    "tg": "tajik",
    "sd": "sindhi",
    "gu": "gujarati",
    "am": "amharic",
    "yi": "yiddish",
    "lo": "lao",
    "uz": "uzbek",
    "fo": "faroese",
    "ht": "haitian creole",
    "ps": "pashto",
    "tk": "turkmen",
    "nn": "nynorsk",
    "mt": "maltese",
    "sa": "sanskrit",
    "lb": "luxembourgish",
    "my": "myanmar",
    "bo": "tibetan",
    "tl": "tagalog",
    "mg": "malagasy",
    "as": "assamese",
    "tt": "tatar",
    "haw": "hawaiian",
    "ln": "lingala",
    "ha": "hausa",
    "ba": "bashkir",
    "jw": "javanese",
    "su": "sundanese",
    "yue": "cantonese",
}
"""English names by code, in the order of the tokens."""
LONGEST_CODE = 3  # letters
SPACELESS = frozenset(("zh", "ja", "th", "lo", "my", "yue", "bo", "km"))
"""Languages that write no spaces between words."""
_OTHER_NAMES = {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
    "bokmål": "no",
    "javanese": "jw",
    "jv": "jw",
    "iw": "he",
    "nb": "no",
}


def language_code(given: str, known: Collection[str]) -> str:
    """Return the code, such as "de", of a language given as "de", "de-CH" or "German". Raises
    TreadleError unless the code is one of ``known``, a model's codes.
    """
    text = given.strip().lower()
    names = {name: code for code, name in LANGUAGES.items()} | _OTHER_NAMES
    for each in (text, text.replace("_", "-").partition("-")[0]):
        code = names.get(each, each)
        if code in known:
            return code
    spelt = [*known, *(LANGUAGES[code] for code in known if code in LANGUAGES)]
    # Short texts resemble unrelated codes: "deu" (German) is nearer to "eu" than to "de".
    near = get_close_matches(text, spelt, n=1) if len(text) > LONGEST_CODE else []
    hint = f"; did you mean {near[0]}?" if near else ""
    if len(known) <= 1:
        hint = ": the model knows no other than " + ("".join(known) or "its own")
    raise TreadleError(f"language={given!r:.40}: expected a code such as 'en', or a name{hint}")


def language_name(code: str) -> str:
    """Return the English name for a code, in lower case; an unknown code is returned unchanged."""
    return LANGUAGES.get(code, code)
