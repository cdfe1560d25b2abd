"""Mathematical text -> tokens, in one pass and linear time.

One tokenizer serves LaTeX, plain text and Countdown equations. Unicode signs must already have been spelled out
(`surface.spell_out_unicode`). Nothing here judges meaning: a run of letters stays a word until the parser asks.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from veritune.grading.limits import MAX_CHARACTERS, MAX_TOKENS, UnreadableError


class Token(NamedTuple):
    """One token.

    `kind` is "number", "word" (letters in math mode), "text" (letters inside \\text{}), "command" (LaTeX, without its
    backslash) or "sign". `spaced` tells whether white space came before it: `5 m` has a unit where `5m` has a variable.
    """

    kind: str
    text: str
    spaced: bool


_TOKEN = re.compile(
    r"""(?P<space>(?:\s|~|\\[\s,;:!>]|\\q?quad\b)+)
      | (?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][+-]?[0-9]+(?![0-9A-Za-z.])|[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)
      | (?P<command>\\(?:[A-Za-z]+|.))
      | (?P<word>[A-Za-z]+)
      | (?P<sign>\*\*|<=|>=|!=|==|\.\.\.|.)""",
    re.VERBOSE | re.DOTALL,
)

TEXT_COMMANDS = frozenset(
    [
        "text",
        "textbf",
        "textit",
        "textrm",
        "textnormal",
        "mathrm",
        "mbox",
        "hbox",
        "operatorname",
        "textsf",
        "texttt",
        "mathsf",
    ]
)
"""Commands whose braces hold words; one letter inside them is still a variable or a unit."""

_STYLE_COMMANDS = frozenset(
    [
        "left",
        "right",
        "big",
        "Big",
        "bigg",
        "Bigg",
        "bigl",
        "bigr",
        "Bigl",
        "Bigr",
        "biggl",
        "biggr",
        "Biggl",
        "Biggr",
        "displaystyle",
        "textstyle",
        "scriptstyle",
        "mathbf",
        "mathit",
        "mathcal",
        "boldsymbol",
        "bm",
        "limits",
        "nolimits",
        "rm",
        "bf",
        "it",
        "ensuremath",
        "hspace",
        "phantom",
        "color",
    ]
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
    "dots": "...",
    "ldots": "...",
    "cdots": "...",
    "approxeq": "approx",
    "simeq": "approx",
    "bar": "overline",
    "infin": "infty",
    "infinity": "infty",
    "varepsilon": "epsilon",
    "varphi": "phi",
    "smallsetminus": "setminus",
    "backslash": "setminus",
    "bigcup": "cup",
    "bigcap": "cap",
}
_SIGNS_FROM_COMMANDS = frozenset(["<", ">", "*", "÷", "|", "[", "]", "(", ")", ":", "..."])
_SIGN_COMMANDS = {"%": "%", "$": "$", "#": "#", "&": "&", "|": "|"}


def tokenize(text: str) -> list[Token]:
    r"""Split `text` into tokens; raises UnreadableError where it is longer than any answer is.

    `\{` and `\}` become the commands "{" and "}" and so stay apart from LaTeX's grouping braces; `\\` becomes the
    command "\" (the end of a matrix row).
    """
    if len(text) > MAX_CHARACTERS:
        raise UnreadableError("too long")
    tokens: list[Token] = []
    spaced = False
    text_closers: list[bool] = []  # one entry per open brace: does it end a \text{} group?
    depth_of_text = 0
    text_opens = False
    bracket_depth = 0
    commas_are_spaced = ", " in text
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        lexeme = match.group()
        if kind == "space":
            spaced = True
            continue
        if kind == "sign":
            if lexeme == "{":
                text_closers.append(text_opens)
                depth_of_text += text_opens
                if text_opens:
                    text_opens, spaced = False, True
                    continue
            elif lexeme == "}" and text_closers and text_closers.pop():
                depth_of_text -= 1
                spaced = True
                continue
            elif lexeme in "([":
                bracket_depth += 1
            elif lexeme in ")]":
                bracket_depth -= 1
        elif kind == "command":
            name = lexeme[1:]
            if name in _STYLE_COMMANDS:
                continue
            if name in TEXT_COMMANDS:
                text_opens = True
                continue
            name = _SYNONYMS.get(name, name)
            bracket_depth += (name == "{") - (name == "}")
            if name in _SIGNS_FROM_COMMANDS:
                kind = "sign"
            elif name in _SIGN_COMMANDS:
                kind, name = "sign", _SIGN_COMMANDS[name]
            lexeme = name
        elif kind == "word":
            if (depth_of_text or text_opens) and lexeme not in ("e", "i"):
                kind = "text"
        elif "," in lexeme:
            if bracket_depth > 0 and not commas_are_spaced:
                # Inside brackets `(1,234)` is a pair; only a comma set apart elsewhere shows that it cannot be.
                _append_separated(tokens, lexeme, spaced)
                spaced = text_opens = False
                continue
            lexeme = lexeme.replace(",", "")
        tokens.append(Token(kind, lexeme, spaced))
        spaced = text_opens = False
        if len(tokens) > MAX_TOKENS:
            raise UnreadableError("too many tokens")
    return tokens


def _append_separated(tokens: list[Token], lexeme: str, spaced: bool) -> None:
    for position, part in enumerate(lexeme.split(",")):
        if position:
            tokens.append(Token("sign", ",", False))
        tokens.append(Token("number", part, spaced and position == 0))
