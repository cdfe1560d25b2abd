r"""LaTeX that changes how an answer looks and not what it says: `\textcolor{blue}{17}` and `{\bf 17}` are 17."""

from __future__ import annotations

import re

from veritune.grading.math.vocabulary import words

_SWITCHES = (
    "mathbf mathit mathcal mathnormal mathsf mathtt mathscr mathfrak mathord boldsymbol bm pmb ensuremath emph "
    "fbox underline uline ul hl tcbox bold mathop mathrel mathbin smash num bf it rm sf tt sl sc em bfseries "
    "itshape rmfamily normalfont boldmath tiny scriptsize footnotesize small normalsize large Large LARGE huge "
    "Huge displaystyle textstyle scriptstyle scriptscriptstyle"
)
_WITH_OPTIONS = "framebox makebox"
_WITH_ARGUMENT = "color textcolor colorbox raisebox scalebox bbox style"
_WITH_TWO_ARGUMENTS = "fcolorbox resizebox"
_INVISIBLE = "hfill hfil strut mathstrut nonumber notag noindent par centering"
_INVISIBLE_WITH_ARGUMENT = "phantom hphantom vphantom hspace vspace tag label"
_ARGUMENT = r"\s*\{[^{}]{0,60}\}"
_OPTIONS = r"(?:\s*\[[^][]{0,40}\]){0,2}"


def _commands(names: str, rest: str = "") -> str:
    return rf"\\(?:{names.replace(' ', '|')})(?![A-Za-z]){rest}"


_STYLE = re.compile(
    "|".join(
        [
            _commands(_SWITCHES),
            _commands(_WITH_OPTIONS, _OPTIONS),
            _commands(_WITH_ARGUMENT, _OPTIONS + _ARGUMENT),
            _commands(_WITH_TWO_ARGUMENTS, _OPTIONS + _ARGUMENT * 2),
        ]
    )
)
_HIDDEN = re.compile(
    "|".join([_commands(_INVISIBLE), _commands(_INVISIBLE_WITH_ARGUMENT, r"\*?" + _ARGUMENT), r"\\(?:left|right)\."])
)
_ENVIRONMENT = re.compile(
    r"\\(?:begin|end)\{(?:equation|align|aligned|gather|gathered|split|displaymath|math|center|flushleft)\*?\}"
)
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_CHANGED = words(
    " ".join([_SWITCHES, _WITH_OPTIONS, _WITH_ARGUMENT, _WITH_TWO_ARGUMENTS, _INVISIBLE, _INVISIBLE_WITH_ARGUMENT])
)
_MARK = "\x1a"
_NO_ARGUMENT = frozenset(
    "\\" + name for name in words("times cdot div pm mp le leq ge geq ne neq in to approx cup cap land lor quad qquad")
)
_PIECES = re.compile(rf"{_MARK}\s*(\{{)?|\\(?:[A-Za-z]+|.)|[{{}}]|[^\\{{}}{_MARK}]+", re.DOTALL)


def without_styles(text: str) -> str:
    r"""`text` without colours, fonts, boxes, sizes and invisible parts.

    The braces of what a style is given go with it where nothing else needs them: `x=\textcolor{red}{17}` is `x=17`,
    and `2^\mathbf{10}` is `2^{10}`.
    """
    if "\\begin" in text and "\\\\" not in text and _ENVIRONMENT.search(text):
        text = _ENVIRONMENT.sub(" ", text).replace("&", "").strip()
    if _CHANGED.isdisjoint(_COMMAND.findall(text)) and "left." not in text and "right." not in text:
        return text
    text = _HIDDEN.sub(" ", text)
    marked = _STYLE.sub(_MARK, text.replace(_MARK, ""))
    return _unbraced(marked) if _MARK in marked else text


def _unbraced(text: str) -> str:
    """Take off the marks and the braces that belong to them, in one pass."""
    result: list[str] = []
    dropped: list[bool] = []
    loose = True  # whether a group may stand here without its braces
    for match in _PIECES.finditer(text):
        piece = match.group()
        if piece == "{" or match.group(1):
            styled = bool(match.group(1)) or text.startswith(_MARK, _after_spaces(text, match.end()))
            dropped.append(styled and loose)
            if not dropped[-1]:
                result.append("{")
            loose = loose or not dropped[-1]
        elif piece == "}":
            if not (dropped and dropped.pop()):
                result.append("}")
                loose = False
        elif not piece.startswith(_MARK):
            if result and result[-1][-1:].isalpha() and piece[:1].isalpha():
                result.append(" ")
            result.append(piece)
            loose = _is_loose_after(piece, loose)
    return "".join(result)


def _after_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _is_loose_after(piece: str, loose: bool) -> bool:
    r"""Whether the braces after `piece` only group: not those of `^{…}`, `_{…}` and `\frac{…}`."""
    if piece.startswith("\\"):
        return piece in _NO_ARGUMENT or not piece[1:].isalpha()
    stripped = piece.rstrip()
    return stripped[-1:] not in ("^", "_", "]") if stripped else loose
