"""Texts on which tokenizers that are nearly alike differ: what engines and converted files are proved on.

Blanks in every arrangement, above all at a text's end; letters, digits and marks of many scripts; contractions, also
with letters that only fold to them; spelled special tokens; characters that one library knows and another does not;
text in and out of composed form; runs.
"""

from __future__ import annotations

HARD_TEXTS = (
    "",
    " ",
    "a  b   c\t\td\n\n\ne \r\n f\n",
    "   leading and trailing   ",
    "blanks at the end \n ",
    "a\n \nb \n\n  c.\n\n\td;\r\n\r\n ",
    "/* path/to */ \n//\n}\n\n\n",
    "I'm we're they'd you'll he's can't I've 'S 'LL ''s",
    "I'M WE'RE '\u017f it'\u017f x'K\u017f ''ll don\u2019t",
    "camelCase HTTPServer McDonald's ABC's iPhone's xyzÀÉ ǅabc ʰa",
    "x = 12345678901234567890 + 3.14e-10 ½ ² Ⅷ ٣",
    "1 22  333   4444\n55555 a1b22c333 \t6 7\u00a08",
    "<|endoftext|></s><s>[CLS]<|im_start|><|begin_of_text|>",
    "naïve café e\u0301 Å\u030a ﬁ ß İi̇ ǆ",
    "q\u0307\u0323 q\u0323\u0307 \u1100\u1161\u11a8 \u212b \uf900 \u0344 a\u0315\u0300\u05ae\u0062",
    "日本語テキスト 中文 한국어 ไทย हिन्दी العربية עברית",
    "👩‍👩‍👧‍👦🏳️‍🌈 \u200b\u200d\ufeff\u00ad",
    "\u0085\u00a0\u1680\u180e\u2000\u2028\u2029\u202f\u205f\u3000 \x1c\x1d\x1e\x1f\x0b\x0c",
    "\x00\x01\x7f\ufffd\ufffe\U0010ffff\U000e0001",
    "=" * 300 + " " * 300 + "\n" * 50 + "a" * 300,
    "aaaaaaabababababaaab    \t    \t\t\t ,,,,,,,;;;;;;----===-=-=-",
)
