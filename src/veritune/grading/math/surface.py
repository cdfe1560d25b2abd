r"""What an answer looks like, made plain: Unicode signs spelled out, wrappers and math delimiters taken off.

Nothing here changes what is said: `$\boxed{5}$.` becomes `5`, `½` becomes `\frac{1}{2}`, and `5 \text{ or } 6` stays
as it is.
"""

from __future__ import annotations

import re

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱˣʸ", "0123456789+-()nixy", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉ₙₓ", "0123456789nx", strict=True))
_FRACTIONS = {
    sign: f" \\frac{{{top}}}{{{bottom}}}"
    for sign, (top, bottom) in {
        "½": (1, 2), "⅓": (1, 3), "⅔": (2, 3), "¼": (1, 4), "¾": (3, 4), "⅕": (1, 5), "⅖": (2, 5), "⅗": (3, 5),
        "⅘": (4, 5), "⅙": (1, 6), "⅚": (5, 6), "⅐": (1, 7), "⅛": (1, 8), "⅜": (3, 8), "⅝": (5, 8), "⅞": (7, 8),
        "⅑": (1, 9), "⅒": (1, 10),
    }.items()
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΦΨΩℓ",
        [
            "alpha",
            "beta",
            "gamma",
            "delta",
            "epsilon",
            "zeta",
            "eta",
            "theta",
            "iota",
            "kappa",
            "lambda",
            "mu",
            "nu",
            "xi",
            "rho",
            "sigma",
            "tau",
            "upsilon",
            "phi",
            "chi",
            "psi",
            "omega",
            "Gamma",
            "Delta",
            "Theta",
            "Lambda",
            "Xi",
            "Sigma",
            "Phi",
            "Psi",
            "Omega",
            "ell",
        ],
        strict=True,
    )
)
_SIGNS = {
    **dict.fromkeys("−–—‒﹣－‑", "-"),
    **dict.fromkeys("\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", ""),
    **dict.fromkeys("×✕✖⋅·∙•∗", " * "),
    **dict.fromkeys("÷", "÷"),
    **dict.fromkeys("∕⁄／", "/"),
    **dict.fromkeys("‘’′", "'"),
    **dict.fromkeys("“”", '"'),
    "＋": "+", "＝": "=", "．": ".", "，": ",", "（": "(", "）": ")", "％": "%", "：": ":", "。": ".", "、": ",",
    "≦": "\\le ", "≧": "\\ge ",
    "≤": "\\le ", "⩽": "\\le ", "≥": "\\ge ", "⩾": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∓": "\\mp ",
    "∞": "\\infty ", "π": "\\pi ", "∪": "\\cup ", "∩": "\\cap ", "∈": "\\in ", "∖": "\\setminus ", "∅": "\\varnothing ",
    "ø": "\\varnothing ", "°": "^\\circ ", "º": "^\\circ ", "∠": "\\angle ", "△": "\\triangle ", "⟨": "\\langle ",
    "⟩": "\\rangle ", "〈": "\\langle ", "〉": "\\rangle ", "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ",
    "⌉": "\\rceil ", "ℝ": "\\mathbb{R}", "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}",
    "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "…": "...", "⋯": "...", "→": "\\to ", "⇒": "\\Rightarrow ", "∴": "\\therefore ",
    "ϕ": "\\phi ", "∧": "\\land ", "∨": "\\lor ", "℃": "^\\circ C", "℉": "^\\circ F", "𝑖": "i", "ⅈ": "i", "ⅇ": "e",
}  # fmt: skip
_TABLE = str.maketrans(
    _SIGNS
    | _FRACTIONS
    | {sign: f"\\{name} " for sign, name in _GREEK.items()}
    | {chr(ord("０") + digit): str(digit) for digit in range(10)}
    | {chr(ord(first) + shift): chr(ord(plain) + shift) for first, plain in ("ＡA", "ａa") for shift in range(26)}
)
_SUPERSCRIPT_RUN = re.compile("[" + "".join(_SUPERSCRIPTS) + "]+")
_SUBSCRIPT_RUN = re.compile("[" + "".join(_SUBSCRIPTS) + "]+")
_OVERLINED = re.compile("((?:[0-9]\u0305)+)|([0-9])\u0307")

_THIN_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|\\!,|,\\!|~)(?=[0-9]{3}(?![0-9]))")
_SPACED_GROUPS = re.compile(r"(?<![0-9.,/^_{a-zA-Z])([0-9]{1,3})((?: [0-9]{3})++)(?![0-9/]| *[/])")
_ROW_SPACING = re.compile(r"\\\\\[[^\]\[]{0,12}\]")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_CURRENCY_DOLLAR = re.compile(r"\$(?=\s?-?\.?[0-9])")
_BOLD = re.compile(r"(?<![0-9A-Za-z)}\]])\*\*(?! )([^*]{1,200})(?<! )\*\*(?![0-9A-Za-z({\[])")
_REPEATING = re.compile(r"(?<![0-9A-Za-z])([0-9]{0,20}\.[0-9]{0,20})\(([0-9]{1,20})\)\Z")
_UNION_LETTER = re.compile(r"(?<=[)\]])\s?U\s?(?=[(\[])")
_TIMES_LETTER = re.compile(r"(?<=[0-9])\s?[xX]\s?(?=10\s?\^)")
_DEGREE_LETTER = re.compile(r"(?<=[0-9])\^\{?o\}?(?![A-Za-z])")
_SET_MINUS = re.compile(r"(?<=\\mathbb\{R\}) ?- ?(?=\\\{|\\left\\\{)")
_MARKS = ("```", "**", "__", "`", '"', "'", "*")
_TRAILING = " \t\r\n.,;:"
_WRAPPERS = ("\\boxed{", "\\fbox{", "\\mathrm{", "\\mathbf{", "\\displaystyle{", "\\ensuremath{", "\\underline{")


def spell_out_unicode(text: str) -> str:
    """Unicode signs as the LaTeX or ASCII that they look like; `2³½` needs care for what it touches."""
    if text.isascii():
        return text
    text = _OVERLINED.sub(_overline, text)
    text = _SUPERSCRIPT_RUN.sub(lambda run: "^{" + "".join(_SUPERSCRIPTS[sign] for sign in run.group()) + "}", text)
    text = _SUBSCRIPT_RUN.sub(lambda run: "_{" + "".join(_SUBSCRIPTS[sign] for sign in run.group()) + "}", text)
    return text.translate(_TABLE)


def _overline(run: re.Match[str]) -> str:
    return "\\overline{" + "".join(character for character in run.group() if character.isdigit()) + "}"


def clean(text: str) -> str:
    """`text` without wrappers, delimiters, digit grouping other than commas, and a sentence's final stop."""
    text = spell_out_unicode(text).strip()
    if text.isalnum():
        return text
    if "$" in text:
        text = _remove_math_dollars(text)
    if "\\" in text:
        text = _ROW_SPACING.sub(r"\\\\ ", text)
        text = _DELIMITERS.sub(" ", text.replace("\\!", "").replace("\\/", ""))
        text = _THIN_GROUPS.sub("", text).replace("\\displaystyle", "")
    elif "{,}" in text or "~" in text:
        text = _THIN_GROUPS.sub("", text)
    text = _peel(text)
    if "\\boxed" in text:
        text = _unbox(text)
    if "\\mathbb" in text:
        text = _SET_MINUS.sub(r"\\setminus ", text)
    if "(" in text:
        text = _REPEATING.sub(r"\1\\overline{\2}", text)
    if "U" in text:
        text = _UNION_LETTER.sub(r" \\cup ", text)
    if "^" in text:
        text = _TIMES_LETTER.sub(" * ", text)
        text = _DEGREE_LETTER.sub(r"^\\circ", text)
    if text.startswith("~"):
        text = "\\approx " + text[1:]
    if " " in text:
        text = _SPACED_GROUPS.sub(lambda group: group.group(1) + group.group(2).replace(" ", ""), text)
    return text


def _unbox(text: str) -> str:
    """The content of a box within a sentence; of several boxes, none."""
    start = text.index("\\boxed")
    opening = start + len("\\boxed")
    if text.count("\\boxed") > 1 or text[opening : opening + 1] != "{":
        return text
    closing = closing_brace(text, opening)
    return text if closing < 0 else _peel(f"{text[:start]} {text[opening + 1 : closing]} {text[closing + 1 :]}")


def _remove_math_dollars(text: str) -> str:
    """Dollars that delimit mathematics become spaces; a dollar that names money stays.

    Every dollar of `$5 and $6` stands before a digit, so they are money; `$5$ and $6$` has two that do not.
    """
    bare = text.replace("\\$", "")
    if bare.count("$") == len(_CURRENCY_DOLLAR.findall(bare)) and "$$" not in bare:
        return text.replace("\\$", "$")
    return "\\$".join(part.replace("$", " ") for part in text.split("\\$")).replace("\\$", "$")


def _peel(text: str) -> str:
    """Take off what stands around the whole text, layer by layer."""
    if text[:1].isalnum() and text[-1:].isalnum() and "**" not in text:
        return text
    for _ in range(8):
        before = text
        text = text.strip().lstrip("=:").strip()
        if not text.endswith("..."):
            text = text.rstrip(_TRAILING)
        if text.endswith("\\"):
            text = text[:-1]
        for wrapper in _WRAPPERS if text.startswith(_WRAPPERS) else ():
            if text.startswith(wrapper) and closing_brace(text, len(wrapper) - 1) == len(text) - 1:
                text = text[len(wrapper) : -1]
        if "**" in text:
            text = _BOLD.sub(r"\1", text)
        for mark in _MARKS if text.startswith(_MARKS) else ():
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                inner = text[len(mark) : -len(mark)]
                if mark not in inner:
                    text = inner
        if text == before:
            break
    return text


_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def closing_brace(text: str, opening: int, limit: int = 4_000) -> int:
    """The index of the brace that closes the one at `opening`, or -1 if none does within `limit` characters."""
    depth = 0
    for match in _BRACES.finditer(text, opening, opening + limit):
        sign = match.group()
        if sign == "{":
            depth += 1
        elif sign == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1
