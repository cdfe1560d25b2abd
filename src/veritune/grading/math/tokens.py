"""Mathematical text -> tokens, in one pass and linear time.

One tokenizer serves LaTeX, plain text and Countdown equations. Unicode signs must already have been spelled out
(`unicode_signs.spell_out_unicode`). Nothing here judges meaning: a run of letters stays a word until the parser asks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from veritune.grading.math.limits import MAX_CHARACTERS, MAX_TOKENS, UnreadableError
from veritune.grading.math.vocabulary import words


class Token(NamedTuple):
    """One token.

    `kind` is "number", "word" (letters in math mode), "text" (letters inside \\text{}), "command" (LaTeX, without its
    backslash) or "sign". `spaced` tells whether white space came before it: `5 m` has a unit where `5m` has a variable.
    """

    kind: str
    text: str
    spaced: bool


_TOKEN = re.compile(
    r"""(?P<space>(?:\s|~|\\[\s,;:!>]|\\(?:q?quad|(?:neg)?(?:thin|med|thick)space|enspace)\b)+)
      |
     
     
      (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]+(?![0-9A-Za-z.])|[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)
      | (?P<command>\\(?:[A-Za-z]+|.))
      | (?P<word>[A-Za-z]+)
      | (?P<sign>\*\*|<=|>=|!=|==|\.\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)

TEXT_COMMANDS = words(
    "text textbf textit textrm textnormal mathrm mbox hbox operatorname textsf texttt textup textsl textsc textmd"
)
"""Commands whose braces hold words; one letter inside them is still a variable or a unit."""

_STYLE_COMMANDS = words(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm limits nolimits"
)
"""Commands that change how a formula looks and not what it says."""

_SYNONYMS = {
    "dfrac": "frac",
    "tfrac": "frac",
    "cfrac": "frac",
    "dbinom": "binom",
    "tbinom": "binom",
    "leq": "le",
    "leqslant": "le",
    "geq": "ge",
    "geqslant": "ge",
    "neq": "ne",
    "lt": "<",
    "gt": ">",
    "times": "*",
    "cdot": "*",
    "ast": "*",
    "div": "÷",
    "lbrace": "{",
    "rbrace": "}",
    "lvert": "|",
    "rvert": "|",
    "vert": "|",
    "mid": "|",
    "lbrack": "[",
    "rbrack": "]",
    "lparen": "(",
    "rparen": ")",
    "emptyset": "varnothing",
    "colon": ":",
    "degree": "circ",
    "degrees": "circ",
    "textdegree": "circ",
    "dots": "...",
    "ldots": "...",
    "cdots": "...",
    "approxeq": "approx",
    "simeq": "approx",
    "bar": "overline",
    "dot": "overline",
    "surd": "√",
    "infin": "infty",
    "infinity": "infty",
    "varepsilon": "epsilon",
    "varphi": "phi",
    "smallsetminus": "setminus",
    "backslash": "setminus",
    "bigcup": "cup",
    "bigcap": "cap",
}
_SIGNS_FROM_COMMANDS = words("√ < > * ÷ | [ ] ( ) : ... % $ # &")
OPENERS = words("( [ { langle begin lfloor lceil")
CLOSERS = words(") ] } rangle end rfloor rceil")
_BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def tokenize(text: str) -> list[Token]:
    r"""Split `text` into tokens; raises UnreadableError where it is longer than any answer is.

    `\{` and `\}` become the commands "{" and "}" and so stay apart from LaTeX's grouping braces; `\\` becomes the
    command "\" (the end of a matrix row).
    """
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError("too long")
    tokens = _scan(text)
    if len(tokens) > MAX_TOKENS:
        raise UnreadableError("too many tokens")
    if "\\" in text and any(token.kind == "command" and token.text in TEXT_COMMANDS for token in tokens):
        tokens = _mark_text(tokens)
    if "," in text and any("," in token.text and token.kind == "number" for token in tokens):
        tokens = _resolve_commas(tokens, commas_are_spaced=", " in text.replace(", - ", ",-"))
    return tokens


def _scan(text: str) -> list[Token]:
    tokens: list[Token] = []
    spaced = False
    for match in _TOKEN.finditer(text):
        kind, lexeme = match.lastgroup or "", match.group()
        if kind == "space":
            spaced = True
            continue
        if kind == "command":
            name = lexeme[1:]
            if name in _STYLE_COMMANDS:
                continue
            lexeme = _SYNONYMS.get(name, name)
            if lexeme in _SIGNS_FROM_COMMANDS:
                kind = "sign"
        tokens.append(Token(kind, lexeme, spaced))
        spaced = False
    return tokens


def _mark_text(tokens: list[Token]) -> list[Token]:
    r"""Drop the braces of \text{…} and mark the words inside; `e` and `i` in roman type stay constants."""
    result: list[Token] = []
    braces_are_text: list[bool] = []
    opening = spaced = False
    for token in tokens:
        is_text = True in braces_are_text
        if token.kind == "command" and token.text in TEXT_COMMANDS:
            opening = True
            spaced = spaced or token.spaced
            continue
        if token.kind == "sign" and token.text == "{":
            braces_are_text.append(opening)
            if opening:
                opening, spaced = False, True
                continue
        elif token.kind == "sign" and token.text == "}" and braces_are_text and braces_are_text.pop():
            spaced = True
            continue
        kind = "text" if token.kind == "word" and (is_text or opening) and token.text not in ("e", "i") else token.kind
        result.append(Token(kind, token.text, token.spaced or spaced))
        opening = spaced = False
    return result


def _resolve_commas(tokens: list[Token], commas_are_spaced: bool) -> list[Token]:
    """Join `1,234` outside brackets; inside, `(1,234)` is a pair unless a spaced comma shows that it is not."""
    result: list[Token] = []
    depth = 0
    for token in tokens:
        if token.kind == "number" and "," in token.text:
            if depth > 0 and not commas_are_spaced:
                for position, part in enumerate(token.text.split(",")):
                    if position:
                        result.append(Token("sign", ",", False))
                    result.append(Token("number", part, token.spaced and position == 0))
            else:
                result.append(token._replace(text=token.text.replace(",", "")))
            continue
        if token.text in _BRACKETS and (token.kind == "command" or token.text not in "{}"):
            depth += _BRACKETS[token.text]
        result.append(token)
    return result
