"""Pre-tokenizers by the name that `tokenizer.ggml.pre` holds, for byte-level BPE.

A rule says how text is cut into words before BPE merges, and three facts that come with the name:
whether a word that is itself a token skips the merges, whether a begin token is added when the
file does not say, and whether the published tokenizer normalises to NFC first. The cuts follow the
tokenizer.json files of the models the names stand for; each pattern cuts the pieces that the
pattern before it left, and text between matches is kept as words of its own.
"""

from __future__ import annotations

from msgspec import Struct

from paceline.errors import TokenizerError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"


def _cl100k(digits: str) -> str:
    """The pattern of GPT-4's tokenizer with another rule for digits."""
    return (
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
    )


def _o200k(digits: str, contraction: str) -> str:
    """The pattern of GPT-4o's tokenizer, which also cuts where case changes."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{contraction}"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _BLANKS,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_SEED = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)


class PreTokenizer(Struct, frozen=True):
    """How one name cuts text, and what else the name implies."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken without merging
    adds_bos: bool = False  # when the file has no add_bos_token key
    nfc: bool = False


_LLAMA3 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),), whole_words=True, adds_bos=True)
_GPT4 = PreTokenizer((_cl100k(r"\p{N}{1,3}"),))
_QWEN2 = PreTokenizer((_cl100k(r"\p{N}"),))
_GPT2 = PreTokenizer((GPT2,))
_DIGITS_GPT2 = PreTokenizer((_DIGIT, GPT2))
_O200K = PreTokenizer((_o200k(r"\p{N}{1,3}", _CONTRACTION + "?"),))
_V3 = PreTokenizer(_DEEPSEEK3)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_DEFAULT),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "midm-2.0"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _GPT4),
    "qwen2": PreTokenizer(_QWEN2.patterns, nfc=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"), _QWEN2
    ),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat", "mellum",
         "modern-bert", "jais", "trillion", "granite-docling", "exaone4", "a.x-4.0"),
        _GPT2,
    ),
    **dict.fromkeys(("olmo", "mpt"), PreTokenizer((GPT2,), nfc=True)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2
    ),
    "command-r": PreTokenizer(_DIGITS_GPT2.patterns, nfc=True),
    "tekken": PreTokenizer((_o200k(r"\p{N}", ""),), whole_words=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _O200K),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _V3),
    "deepseek-coder": PreTokenizer(_DEEPSEEK_CODER),
    "falcon": PreTokenizer(_FALCON),
    **dict.fromkeys(("bloom", "gpt3-finnish", "poro-chat"), PreTokenizer((_BLOOM,))),
    "viking": PreTokenizer((_BLOOM, _DIGIT)),
    "seed-coder": PreTokenizer((_SEED,)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), PreTokenizer((_BAILING,))),
}  # fmt: skip


def pre_tokenizer(name: str | None) -> PreTokenizer:
    """Return the rule for `name` (None: "default", as files without the key expect)."""
    rule = PRE_TOKENIZERS.get("default" if name is None else name)
    if rule is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which this build does not know: convert the model "
            f"with one of {', '.join(sorted(PRE_TOKENIZERS))}, or use its tokenizer.json"
        )
    return rule
