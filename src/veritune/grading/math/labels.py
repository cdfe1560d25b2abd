r"""Labels: what a value is said to be of, such as `x` in `x = 5` and `f(x)` in `f(x) = 2x`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from veritune.grading.math.nodes import Node, variable
from veritune.grading.math.prose import is_wordy
from veritune.grading.math.tokens import CLOSERS, OPENERS, Token
from veritune.grading.math.vocabulary import GREEK_LETTERS

_NO_LABEL = frozenset({"frac", "sqrt", "pm", "cdot", "pi"})
_NO_FUNCTIONS = frozenset("abcdijklmnorstuvwxyz")
"""Letters that are variables rather than functions before a bracket with a sum in it."""
_INDICES = frozenset("ijkmn")


class Label(NamedTuple):
    """The left side of `label = value`."""

    text: str
    """The variable, or "?" for a longer label such as `f(2)` and words."""
    function: tuple[str, ...] = ()
    """The name and the variables of `f(x)` and of the sequence `a_n`, for which any other variables would do."""
    subjects: frozenset[str] = frozenset()
    """The variables and functions that the label defines: an equation whose value contains them defines nothing."""


def read_label(tokens: Sequence[Token]) -> Label | None:
    """The tokens as a label; None where they are none: a sum, a product, a power, a number."""
    inverse, tokens = _split_inverse(tokens)
    if not tokens or len(tokens) > 12 or tokens[0].kind == "number":
        return None
    depth = names = groups = 0
    wordy = False
    for index, token in enumerate(tokens):
        if token.kind in ("sign", "command") and token.text in OPENERS:
            if depth == 0 and token.text in ("(", "["):
                groups += 1
                if groups > 1 or not _is_argument(tokens, index):
                    return None
            depth += 1
        elif token.kind in ("sign", "command") and token.text in CLOSERS:
            depth -= 1
        elif depth or (index and tokens[index - 1].text == "_"):
            continue
        elif _cannot_label(token):
            return None
        elif token.kind in ("word", "text"):
            if is_wordy(tokens, index) or token.kind == "text":
                wordy = True
            elif len(token.text) > 1 and not token.text.isupper():
                return None
            names += 1
    if names > 1 and not wordy and not any(token.kind == "command" for token in tokens):
        return None
    name = "".join(token.text for token in tokens if token.text not in "{}")
    simple = not wordy and "(" not in name and names <= 1
    return Label(name if simple else "?", _function(tokens, inverse), _subjects(tokens))


def _subjects(tokens: Sequence[Token]) -> frozenset[str]:
    """The variables that the label defines: `f` of `f(x)`, both of `(x, y)`."""
    is_tuple = tokens[0].text in ("(", "[")
    depth = 0
    subjects: set[str] = set()
    for index, token in enumerate(tokens):
        depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
        is_variable = (len(token.text) == 1 and token.text.isalpha()) or token.text in GREEK_LETTERS
        if is_variable and (is_tuple or not depth) and not (index and tokens[index - 1].text == "_"):
            subjects.add(_subscripted(tokens, index))
    return frozenset(subjects)


def _cannot_label(token: Token) -> bool:
    return token.kind == "number" or token.text in _NO_LABEL or (token.kind == "sign" and token.text not in "_'|")


def _split_inverse(tokens: Sequence[Token]) -> tuple[str, Sequence[Token]]:
    """`f^{-1}(2)` is as good a label as `f(2)`."""
    is_inverse = [token.text for token in tokens[1:6]] == ["^", "{", "-", "1", "}"]
    return ("^-1", [tokens[0], *tokens[6:]]) if is_inverse else ("", tokens)


def _is_argument(tokens: Sequence[Token], opening: int) -> bool:
    """Whether a bracket belongs to a label: `f(x+1)`, `P(A)` and `(x, y)`, unlike those of `x(x-5)` and `(x-2)`."""
    inside = tokens[opening + 1 :]
    has_operator = any(token.kind == "sign" and token.text in "+-*/^" for token in inside)
    if opening == 0:
        return not has_operator
    name = tokens[opening - 1].text
    return name not in _NO_FUNCTIONS or not (has_operator or name in {token.text for token in inside})


def _subscripted(tokens: Sequence[Token], index: int) -> str:
    """The variable at `index` with its subscript, spelled as the parser does."""
    if index + 1 == len(tokens) or tokens[index + 1].text != "_":
        return tokens[index].text
    end = index + 3
    if tokens[index + 2 : end] and tokens[index + 2].text == "{":
        while end < len(tokens) and tokens[end - 1].text != "}":
            end += 1
    return tokens[index].text + "".join(token.text for token in tokens[index + 1 : end] if token.text not in "{}")


def _function(tokens: Sequence[Token], inverse: str) -> tuple[str, ...]:
    """`f(x, y)` as ("f", "x", "y") and `a_n` as ("a_", "n"); () where the tokens are nothing of the kind."""
    texts = [token.text for token in tokens if token.text not in "{}"]
    if len(texts) == 3 and texts[1] == "_" and texts[2] in _INDICES:
        return (texts[0] + "_", texts[2])
    primes = texts.count("'")
    name, rest = texts[0] + "'" * primes + inverse, texts[1 + primes :]
    if len(rest) < 3 or rest[0] not in ("(", "[") or rest[-1] not in (")", "]") or set(rest[2:-1:2]) - {","}:
        return ()
    parameters = rest[1:-1:2]
    are_variables = all(
        text in GREEK_LETTERS or (len(text) == 1 and text.isalpha() and text not in "ei") for text in parameters
    )
    return (name, *parameters) if are_variables and len(set(parameters)) == len(parameters) else ()


def defines(label: Label, node: Node) -> bool:
    """Whether `label = node` says what the label is; `x = x+1` and `r = \\pi r^2` are equations instead."""
    if node.kind in ("relation", "member", "union", "intersection"):
        return True  # the x of {x | x > 5} is the set's own
    names = _names(node)
    return not any(name.rstrip("'") in names for name in label.subjects)


def _names(node: Node) -> set[str]:
    """The variables, constants and functions in a tree, without primes."""
    names = {node.value.rstrip("'")} if node.kind in ("variable", "constant", "function") else set()
    return names.union(*map(_names, node.children)) if node.children else names


def renamed(node: Node, function: tuple[str, ...]) -> Node:
    """The tree with the variables of `function` numbered, so that `2x` of `f(x)` and `2t` of `f(t)` are one tree."""
    names = {name: variable(f"#{position}") for position, name in enumerate(function[1:])}

    def rename(part: Node) -> Node:
        if part.kind == "variable":
            return names.get(part.value, part)
        return Node(part.kind, tuple(map(rename, part.children)), part.value) if part.children else part

    return rename(node)
