"""Unicode signs as the LaTeX or ASCII that they look like."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from veritune.grading.math.vocabulary import GREEK_LETTERS

_SIGNS = {
    **dict.fromkeys("−–—‒﹣－‑", "-"),
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("【】「」『』", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\u2061\u2062\u2063\u2064\ufeff\ufe0e\ufe0f\u00ad", ""),
    **dict.fromkeys("×✕✖⋅·∙•∗", " * "),
    **dict.fromkeys("÷", "÷"),
    **dict.fromkeys("∕⁄／", "/"),
    **dict.fromkeys("‘’′", "'"),
    **dict.fromkeys("“”", '"'),
    **dict.fromkeys("°º˚ᵒ", "^\\circ "),
    "。": ".", "、": ",", "∘": "\\circ ", "‰": "/1000 ", "‱": "/10000 ",
    "≦": "\\le ", "≧": "\\ge ",
    "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∓": "\\mp ",
    "∞": "\\infty ", "π": "\\pi ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∖": "\\setminus ", "∅": "\\varnothing ",
    **dict.fromkeys("øØ⌀", "\\varnothing "), "∠": "\\angle ", "△": "\\triangle ", "⟨": "\\langle ",
    "⟩": "\\rangle ", "〈": "\\langle ", "〉": "\\rangle ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ",
    "⌉": "\\rceil ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "…": "...", "⋯": "...", "→": "\\to ", "⇒": "\\Rightarrow ", "∴": "\\therefore ",
    "ϕ": "\\phi ", "∧": "\\land ", "∨": "\\lor ", "℃": "^\\circ C", "℉": "^\\circ F", "ℓ": "\\ell ",
}  # fmt: skip


def _greek() -> Iterator[tuple[str, str]]:
    for name in GREEK_LETTERS - {"ell"}:
        case = "CAPITAL" if name[0].isupper() else "SMALL"
        yield unicodedata.lookup(f"GREEK {case} LETTER {name.upper().replace('LAMBDA', 'LAMDA')}"), f"\\{name} "


def _decomposed(tag: str, *ranges: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """The signs in the ranges that Unicode calls a form of others, with those others."""
    for start, end in ranges:
        for sign in map(chr, range(start, end)):
            kind, *codes = unicodedata.decomposition(sign).split() or [""]
            if kind == tag:
                yield sign, "".join(chr(int(code, 16)) for code in codes)


_SUPERSCRIPTS = {
    sign: plain
    for sign, plain in _decomposed("<super>", (0xB2, 0xBA), (0x2B0, 0x2E4), (0x1D2C, 0x1D6B), (0x2070, 0x2080))
    if sign != "ᵒ"
} | {"⁻": "-"}
_SUBSCRIPTS = dict(_decomposed("<sub>", (0x2080, 0x209D))) | {"₋": "-"}
_FRACTIONS = {
    sign: " \\frac{{{}}}{{{}}}".format(*parts.split("⁄"))
    for sign, parts in _decomposed("<fraction>", (0xBC, 0xBF), (0x2150, 0x215F), (0x2189, 0x218A))
}
_LETTERS = {  # mathematical alphabets, full width, ligatures, Roman numerals
    sign: unicodedata.normalize("NFKC", sign)
    for tag, start, end in [
        ("<font>", 0x2100, 0x2150),
        ("<font>", 0x1D400, 0x1D800),
        ("<wide>", 0xFF01, 0xFFE7),
        ("<small>", 0xFE50, 0xFE6C),
        ("<compat>", 0xFB00, 0xFB07),
        ("<compat>", 0x2160, 0x2180),
    ]
    for sign, _ in _decomposed(tag, (start, end))
}
_UNITS = {  # ㎡ is m²
    sign: " " + "".join(f"^{{{_SUPERSCRIPTS[part]}}}" if part in _SUPERSCRIPTS else part for part in parts)
    for sign, parts in _decomposed("<square>", (0x3371, 0x33E0))
}
_PLAIN = _SIGNS | _FRACTIONS | dict(_greek())
_TABLE = str.maketrans(
    {sign: "".join(_PLAIN.get(part, part) for part in text) for sign, text in (_LETTERS | _UNITS).items()} | _PLAIN
)
_SCRIPT_FRACTION = re.compile("([⁰¹²³⁴⁵⁶⁷⁸⁹]{1,20})[⁄/∕／]([₀-₉]{1,20})")
_SUPERSCRIPT_RUN = re.compile("[" + "".join(_SUPERSCRIPTS) + "]+")
_SUBSCRIPT_RUN = re.compile("[" + "".join(_SUBSCRIPTS) + "]+")
_OVERLINED = re.compile("((?:[0-9]\u0305)+)|([0-9]\u0307(?:[0-9]*[0-9]\u0307)?)")


def spell_out_unicode(text: str) -> str:
    """Unicode signs as LaTeX or ASCII; scripts and marks over digits are read with what they belong to."""
    text = text.replace("=\u0338", "≠").replace("⅟", "¹⁄")
    text = _OVERLINED.sub(lambda run: "\\overline{" + "".join(filter(str.isdecimal, run.group())) + "}", text)
    text = _SCRIPT_FRACTION.sub(
        lambda run: f" \\frac{{{_plain(run.group(1), _SUPERSCRIPTS)}}}{{{_plain(run.group(2), _SUBSCRIPTS)}}}", text
    )
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + _plain(run.group(), _SUPERSCRIPTS) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + _plain(run.group(), _SUBSCRIPTS) + "}", text)
    return text.translate(_TABLE)


def _plain(run: str, table: dict[str, str]) -> str:
    return "".join(table[sign] for sign in run)
