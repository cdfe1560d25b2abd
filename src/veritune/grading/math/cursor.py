"""A position in a list of tokens, and how deep the parser that moves it has gone."""

from __future__ import annotations

from veritune.grading.math.limits import MAX_DEPTH, UnreadableError
from veritune.grading.math.tokens import Token

_END = Token("end", "", False)


class Cursor:
    """All the state that recursive descent needs."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.count = len(tokens)
        self.position = 0
        self.depth = 0
        self.bars_open = 0

    def peek(self, ahead: int = 0) -> Token:
        index = self.position + ahead
        return self.tokens[index] if index < self.count else _END

    def take(self) -> Token:
        token = self.peek()
        self.position += 1
        return token

    def accept(self, text: str, kind: str = "sign") -> bool:
        if self.position < self.count:
            token = self.tokens[self.position]
            if token.text == text and token.kind == kind:
                self.position += 1
                return True
        return False

    def expect(self, text: str, kind: str = "sign") -> None:
        if not self.accept(text, kind):
            raise UnreadableError(f"expected {text!r}, found {self.peek().text!r}")

    def deeper(self, levels: int = 1) -> None:
        self.depth += levels
        if self.depth > MAX_DEPTH:
            raise UnreadableError("nested too deep")
