"""A tokenizer.json as the `tokenizer.ggml.*` keys of a GGUF file, where these can say it.

Byte-level BPE becomes `gpt2`, BPE over characters with bytes for the rest (Gemma, Llama 2) `llama`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from paceline.errors import TokenizerError, UnsupportedModelError
from paceline.text.pretokenizers import GPT2, PRE_TOKENIZERS
from paceline.text.spm import SPACE
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from paceline.text.vocabulary import TokenType
from paceline.weights.checkpoint import Checkpoint, HFTokenizerData

# Texts that tokenizers disagree about.
SAMPLES = (
    "Hello, world!", " leading", "two  spaces   three", "trailing  ", "\n", "\n\n\n a\n  b\r\nc\r",
    "\ttab\t\ttabs ", "I'm, you'RE, we'Ll; don't'", "1 22 333 4444 1234567 3.14", "½ ² ٣ 一二三",
    "camelCase HTTPServer snake_case __init__", "def f(x):\n    return x ** 2  # ok\n",
    "naïve café ", "cafe\u0301 A\u030a \u1e9b\u0323", "日本語のテキスト", "текст 한국어 العربية",
    "😀👩‍👩‍👧 ☕️", "a\u200bb\u00a0c\u3000d\u2028e", "\x00\x01\x7f", "ﬁ Ａ ① Ω", "<>{}[]()..!?;--==",
    f"a{SPACE}b <0x41> <unk>", "https://x.y/z?q=1&r=%20", "𐍈 \U000e0001 \ufffd", "The THE tHe",
)  # fmt: skip
_NUM_PIECES = 500  # tokens, spread over the vocabulary, whose texts are samples too


def gguf_tokenizer(checkpoint: Checkpoint, where: str) -> dict[str, Any]:
    """Return the keys; raises UnsupportedModelError by what GGUF has no word for."""
    data = checkpoint.tokenizer
    assert isinstance(data, HFTokenizerData)
    if not data.json:
        _refuse(where, "there is no tokenizer.json")
    tokenizer = build_tokenizer(data)
    spec = json.loads(data.json)
    model = spec.get("model") or {}
    kind = model.get("type", "BPE" if "merges" in model else None)  # older files name none
    if kind != "BPE":
        _refuse(where, f"the model {kind}")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            _refuse(where, f"{key} {model[key]!r}")
    added = spec.get("added_tokens") or []
    for token in added:
        for key in ("lstrip", "rstrip", "single_word"):
            if token.get(key):
                _refuse(where, f"{key} of the token {token['content']!r}")
    merges = [m if isinstance(m, str) else _joined(m, where) for m in model.get("merges") or ()]
    tokens, types = _tokens(model, added, checkpoint.config.vocab_size)
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    if model.get("byte_fallback"):
        keys["tokenizer.ggml.model"] = "llama"
        keys["tokenizer.ggml.pre"] = "default"
        keys["tokenizer.ggml.scores"] = _scores(tokens, types, merges)
        keys["tokenizer.ggml.add_space_prefix"] = _adds_space(spec, where)
    else:
        keys["tokenizer.ggml.model"] = "gpt2"
        keys["tokenizer.ggml.pre"] = _pre(spec, where)
        keys["tokenizer.ggml.merges"] = merges
    return keys | _special(checkpoint, tokenizer, model.get("unk_token"), tokens)


def refuse_other_tokens(checkpoint: Checkpoint, again: Checkpoint, where: str) -> None:
    """Raise where the GGUF's tokenizer gives other ids or texts, or misses an end token."""
    missing = set(checkpoint.generation.eos_ids) - set(again.generation.eos_ids)
    if missing:
        _refuse(where, f"the end token {min(missing)} beside {list(again.generation.eos_ids)}")
    try:
        ours, theirs = build_tokenizer(again.tokenizer), build_tokenizer(checkpoint.tokenizer)
    except TokenizerError as error:
        _refuse(where, str(error))
    special = list(theirs.special_tokens)[:64]
    beside = [f"a{token}b {token} c\n{token}" for token in special]
    step = max(1, theirs.vocab_size // _NUM_PIECES)
    pieces = [theirs.decode([i], continuation=True) for i in range(0, theirs.vocab_size, step)]
    joined = ["".join(SAMPLES), "".join(pieces), " ".join(pieces)]
    for text in (*SAMPLES, *joined, *beside):
        for parse in (False, True):
            ids = theirs.encode(text, parse_special=parse)
            if ours.encode(text, parse_special=parse) != ids:
                _refuse(where, f"how {text[:40]!r} is cut into tokens")
            if ours.decode(ids, skip_special=False) != theirs.decode(ids, skip_special=False):
                _refuse(where, f"how the tokens of {text[:40]!r} are put together")


def _refuse(where: str, what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{where}: the tokenizer cannot be written as GGUF ({what}): name a folder with -o, which "
        "keeps tokenizer.json"
    )


def _joined(pair: Sequence[str], where: str) -> str:
    if any(" " in part for part in pair):
        _refuse(where, f"the merge {list(pair)!r}")
    return " ".join(pair)


def _tokens(
    model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], size: int
) -> tuple[list[str], Any]:
    """Texts and types of `size` tokens; ids that the tokenizer leaves free are unused ones.

    Tokens beyond the model's embedding are left out: no prompt can have them.
    """
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = np.full(size, TokenType.UNUSED, np.int32)
    for text, i in model["vocab"].items():
        if i < size:
            is_byte = model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text)
            tokens[i], types[i] = text, TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in added:
        i = token["id"]
        if i < size:
            tokens[i] = token["content"]
            types[i] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    unknown = model.get("unk_token")
    if unknown is not None and model["vocab"].get(unknown, size) < size:
        types[model["vocab"][unknown]] = TokenType.UNKNOWN
    return tokens, types


def _scores(tokens: Sequence[str], types: Any, merges: Sequence[str]) -> Any:
    """A piece's score is the rank of the first merge that makes it: earlier ones win."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    scores = np.array([-float(ranks.get(text, len(merges))) for text in tokens], np.float32)
    return np.where(types == TokenType.NORMAL, scores, np.float32(0))


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, of a Sequence each of its own."""
    if step and step["type"] == "Sequence":
        for part in step[parts]:
            yield from _steps(part, parts)
    elif step:
        yield step


def _pattern(step: Mapping[str, Any]) -> str | None:
    pattern = step.get("pattern") or {}
    found = pattern.get("Regex", pattern.get("String"))
    return found if isinstance(found, str) else None


def _pre(spec: Mapping[str, Any], where: str) -> str:
    """The name of the rule that cuts text as the byte-level tokenizer does."""
    kinds = [step["type"] for step in _steps(spec.get("normalizer"), "normalizers")]
    if kinds not in ([], ["NFC"]):
        _refuse(where, f"the normalizer {', '.join(kinds)}")
    patterns: list[str] = []
    is_byte_level = False
    for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"):
        kind, pattern = step["type"], _pattern(step)
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            is_byte_level = True
            patterns += [GPT2] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "Split" and step["behavior"] == "Isolated" and pattern is not None:
            patterns.append(pattern)
        else:
            _refuse(where, f"the pre-tokenizer {kind}")
    whole_words = bool(spec["model"].get("ignore_merges"))
    for name, rule in PRE_TOKENIZERS.items():
        if (rule.patterns, rule.nfc, rule.whole_words) == (
            tuple(patterns), bool(kinds), whole_words,
        ) and is_byte_level:  # fmt: skip
            return name
    _refuse(where, f"no known pre-tokenizer has the patterns {str(patterns)[:120]}")


def _adds_space(spec: Mapping[str, Any], where: str) -> bool:
    """Whether a space is put before a text; refuses what else is done to it."""
    adds = False
    for step in _steps(spec.get("normalizer"), "normalizers"):
        if step["type"] == "Prepend" and step["prepend"] == SPACE:
            adds = True
        elif step["type"] != "Replace" or _pattern(step) != " " or step["content"] != SPACE:
            _refuse(where, f"the normalizer {step['type']}")
    for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace" and step.get("prepend_scheme") in ("always", "never"):
            adds = adds or step["prepend_scheme"] == "always"
        elif step["type"] != "Split" or _pattern(step) != " ":
            _refuse(where, f"the pre-tokenizer {step['type']}")
    return adds


def _special(
    checkpoint: Checkpoint, tokenizer: Tokenizer, unknown: str | None, tokens: Sequence[str]
) -> dict[str, Any]:
    """Ids of the tokens that have keys of their own, and which of them a text gets."""
    plain, full = (tokenizer.encode("a", add_special=flag) for flag in (False, True))
    adds_eos = full[-1] != plain[-1]
    bos = full[0] if tokenizer.adds_bos else tokenizer.bos_id
    ends = list(checkpoint.generation.eos_ids)
    eos = tokenizer.eos_id
    if eos is None and ends:
        eos = ends[0]
    others = [i for i in ends if i != eos]
    ids = {
        "bos": bos, "eos": eos, "eot": others[0] if others else None,
        "eom": others[1] if len(others) > 1 else None,
        "unknown": tokens.index(unknown) if unknown in tokens else None,
    }  # fmt: skip
    keys: dict[str, Any] = {
        f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items() if i is not None
    }
    keys["tokenizer.ggml.add_bos_token"] = tokenizer.adds_bos
    keys["tokenizer.ggml.add_eos_token"] = adds_eos
    return keys
