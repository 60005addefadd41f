"""Text that tokenizers get wrong: the corpus of tests that compare ids with another implementation."""

from __future__ import annotations

import random
from collections.abc import Iterable

_BASE = (
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n\n", "\t", "\t\t\t", "\r\n", " \n", "\n ", " \n\n  \t x",
    "a", "A", " a", "a ", "Hello, world!", "Hello  world", "hello\nworld", "hello \n\n world  ",
    "don't can't I'll we've they're it's I'M DON'T y'all's 'tis", "’s curly’ll",
    "1", "12", "123", "1234", "1234567890", "3.14159", "1,000,000.00", "1e-10", "0x1F", "½ ² Ⅳ ٣٤٥ ４５",
    "x=1;y=2", "foo_bar", "fooBar", "FooBarBAZ", "HTTPServer2", "a.b.c", "a/b\\c", "a-b--c---d",
    "naïve café résumé Ångström", "e\u0301 a\u030a\u0323 n\u0303", "Zalgo: h\u0335\u0321e\u0334l\u0337l\u0338o",
    "日本語のテキスト", "中文字符测试，标点。", "한국어 텍스트", "ｆｕｌｌｗｉｄｔｈ", "ﾊﾝｶｸ", "漢字かなカナ123",
    "שלום עולם", "مرحبا بالعالم", "العربية ١٢٣ abc", "\u202eRTL override\u202c", "हिन्दी पाठ", "ไทย ข้อความ",
    "Ελληνικά", "Русский текст", "ქართული", "አማርኛ", "Việt Nam tiếng Việt",
    "😀", "😀😀", "a😀b", "👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪🇫🇷", "☺️", "✨ sparkle ✨", "e💩e",
    "\u200b\u200c\u200d\ufeff", "\u00a0nbsp\u00a0\u00a0x", "\u3000wide space", "\u2028line\u2029para",
    "\x00\x01\x7f", "\x1b[31mred\x1b[0m", "tab\tin\ttext", "trailing   ", "   leading",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) { a[i] = b[i] << 2; }\n", "#include <stdio.h>\nint main(){}\n",
    "<html><body class=\"x\">\n  <p>Hi</p>\n</body></html>", "SELECT * FROM t WHERE a='b' -- c",
    "{\"a\": [1, 2.5, null, true], \"b\": {\"c\": \"\\u00e9\"}}", "https://example.com/a?b=c&d=%20#e",
    "user@example.com", "$x$ \\frac{a}{b} \\\\", "**bold** _it_ `code` ~~x~~", "| a | b |\n|---|---|\n",
    "!!!???...", "!?!?", "…—–", "“quoted” ‘x’", "#@$%^&*()_+{}|:<>?", "-----=====*****", "((((()))))",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "abababababababababababababababababababababababababababababababababababababababababababab",
    "Pneumonoultramicroscopicsilicovolcanoconiosis", "\u2581literal\u2581block", "▁▁", "Ġ Ċ ĉ",
    "<|im_start|", "|im_end|>", "<s>", "</s>", "<unk>", "<0x0A>", "[INST]", "<|", "<<|im_end|>>",
    "ſ'ſ K Å", "İı", "ǅ ǆ", "ﬁ ﬂ", "\U0001d54f\U0001d552", "𠜎𠜱", "𐍈", "\U000e0041",
    "Mr. O'Neill's 3rd-party app's 2nd v1.2.3-rc4+build.5", "10:30:45 2024-01-31T00:00:00Z",
)  # fmt: skip
_PIECES = (
    "the", " quick", "Brown", "\n", "  ", "\t", "123", "7", "é", "日本", "😀", "👩‍👧", "'s", "'LL", ".",
    ",", "!?", "_", "<", ">", "|", "\u0301", "\u05e9", "x=", "()", "\r\n", "\u200d", "▁", "Ω", " ",
)  # fmt: skip


def hard_texts(count: int = 300) -> list[str]:
    """Return `count` strings: the chosen ones, then random joins of pieces, the same every time."""
    rng = random.Random(20240131)
    made = (
        "".join(rng.choice(_PIECES) for _ in range(rng.randint(2, 30)))
        for _ in range(count - len(_BASE))
    )
    return [*_BASE, *made]


def glued(tokens: Iterable[str]) -> list[str]:
    """Return each token alone, glued to letters, among spaces, and doubled."""
    forms = ("{0}", "a{0}b", " {0} ", "{0}{0}", "x {0}\n{0}y")
    return [form.replace("{0}", token) for token in tokens for form in forms]
