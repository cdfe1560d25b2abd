r"""What an answer looks like, made plain: Unicode signs spelled out, wrappers and math delimiters taken off.

Nothing here changes what is said: `$\boxed{5}$.` becomes `5`, `½` becomes `\frac{1}{2}`, and `5 \text{ or } 6` stays
as it is.
"""

from __future__ import annotations

import re

from veritune.grading.math.chinese import translate_chinese
from veritune.grading.math.markup import without_styles
from veritune.grading.math.unicode_signs import spell_out_unicode

_THIN_GROUPS = re.compile(
    r"(?<=[0-9])(?:(?:\\!)?\s?(?:,|\{,\})\s?(?:\\!\s?)+|\{,\}\s?|\\!,|\\thinspace\s?|\\[,;:! ]|~)(?=[0-9]{3}(?![0-9]))"
)
_SPACED_GROUPS = re.compile(r"(?<![0-9.,/^_{a-zA-Z])([0-9]{1,3})((?: [0-9]{3})++)(?![0-9/]| *[/])")
_ROW_SPACING = re.compile(r"\\\\\[[^\]\[]{0,12}\]")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]")
_CURRENCY_DOLLAR = re.compile(r"\$(?=\s?-?\.?[0-9])")
_BOLD = re.compile(r"(?<![0-9A-Za-z)}\]])\*\*(?! )([^*]{1,200})(?<! )\*\*(?![0-9A-Za-z({\[])")
_REPEATING = re.compile(r"(?<![0-9A-Za-z])([0-9]{0,20}\.[0-9]{0,20})\(([0-9]{1,20})\)\Z")
_UNION_LETTER = re.compile(r"(?<=[)\]])\s?U\s?(?=[(\[])")
_TIMES_LETTER = re.compile(r"(?<=[0-9])\s?[xX]\s?(?=10\s?\^)")
_ROMAN = r"\\(?:text|mathrm|textrm|mbox|hbox|textup|textnormal|operatorname)\s*"
_ROMAN_SIGN = rf"{_ROMAN}(?:\{{\s*(?:o|deg|\^?\\circ)\s*\}}|o(?![A-Za-z]))"
_DEGREE_LETTER = re.compile(
    rf"(?<=[0-9)}}])\s?\^\s*(?:o(?![A-Za-z])|\^\\circ|{_ROMAN_SIGN}|\{{\s*(?:o|\^\\circ|{_ROMAN_SIGN})\s*\}})"
    r"|(?<=[0-9)}])\s?\\textsuperscript\{\s*(?:o|\^?\\circ)\s*\}"
)
_EMPTY_BASE = re.compile(r"(?<!\\)\{\}\s?(?=\^)|(?<=\\circ)\{\}")
_ANGLE = re.compile(r"\\ang\{([0-9.]{1,20})\}")
_BRACED_NOT = re.compile(r"\{\s?(\\ne )\}")
_DOTS_AFTER_PERIOD = re.compile(r"(\\overline\s?\{[0-9]{1,40}\})\s?(?:\\[lc]?dots(?![a-z])|\.\.\.)")
_BARE_POINT = re.compile(r"(?<![0-9A-Za-z])\.(?=\s*\\(?:overline|bar|dot)(?![A-Za-z]))")
_DOTS = re.compile(r"\.([0-9]*)\\dot\s*\{?([0-9])\}?([0-9]*)\\dot\s*\{?([0-9])\}?")
_NOT = re.compile(r"\\not\s*(=|<|>|\{=\}|\\in(?![A-Za-z])|\\[lg]eq?(?![A-Za-z]))")
_OPPOSITES = {"=": "\\ne ", "{=}": "\\ne ", "<": "\\ge ", ">": "\\le ", "\\in": "\\notin ", "\\l": "> ", "\\g": "< "}
_SET_MINUS = re.compile(r"(?<=\\mathbb\{R\}) ?- ?(?=\\\{|\\left\\\{)")
_MARKS = ("```", "**", "__", "`", '"', "'", "*")
_TRAILING = " \t\r\n.,;:"
_WRAPPERS = ("\\boxed{", "\\mathrm{")


def clean(text: str) -> str:
    """`text` without wrappers, delimiters, digit grouping other than commas, and a sentence's final stop."""
    if not text.isascii():
        text = translate_chinese(spell_out_unicode(text))
    text = text.strip()
    if text.isalnum():
        return text
    if "$" in text:
        text = _remove_math_dollars(text)
    if "\\" in text:
        text = _without_commands(text)
    elif "{,}" in text or "~" in text:
        text = _THIN_GROUPS.sub("", text)
    text = _peel(text)
    if "\\boxed" in text:
        text = _unbox(text)
    text = _plain_signs(text)
    if text.startswith("~"):
        text = "\\approx " + text[1:]
    if " " in text:
        text = _SPACED_GROUPS.sub(lambda group: group.group(1) + group.group(2).replace(" ", ""), text)
    return text


def _plain_signs(text: str) -> str:
    """Letters and signs that stand in for others as those: `U` of a union, `x` before 10^3, `o` of a degree."""
    if "\\mathbb" in text:
        text = _SET_MINUS.sub(r"\\setminus ", text)
    if "<>" in text or "=/=" in text:
        text = text.replace("<>", "\\ne ").replace("=/=", "\\ne ")
    if "(" in text:
        text = _REPEATING.sub(r"\1\\overline{\2}", text)
    if "." in text and "\\" in text:
        text = _BARE_POINT.sub("0.", _DOTS.sub(r".\1\\overline{\2\3\4}", text))
        text = _DOTS_AFTER_PERIOD.sub(r"\1", text)
    if "U" in text:
        text = _UNION_LETTER.sub(r" \\cup ", text)
    if "^" in text or "\\textsuperscript" in text:
        text = _TIMES_LETTER.sub(" * ", text)
        text = _DEGREE_LETTER.sub(r"^\\circ ", _EMPTY_BASE.sub("", text))
    return text


def _without_commands(text: str) -> str:
    """`text` without the commands of LaTeX that space, group digits, delimit or decorate."""
    if "\\\\[" in text:
        text = _ROW_SPACING.sub(r"\\\\ ", text)
    text = _THIN_GROUPS.sub("", text).replace("\\!", "").replace("\\/", "")
    if "\\(" in text or "\\[" in text or "\\)" in text or "\\]" in text:
        text = _DELIMITERS.sub(" ", text)
    if "\\not" in text:
        text = _NOT.sub(lambda negated: _OPPOSITES.get(negated[1]) or _OPPOSITES[negated[1][:2]], text)
        text = _BRACED_NOT.sub(r"\1", text)
    if "\\ang" in text:
        text = _ANGLE.sub(r"\1^\\circ ", text)
    return without_styles(text)


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
