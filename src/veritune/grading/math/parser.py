"""Tokens -> expression tree: a recursive-descent parser without back-tracking, bounded in depth.

Grammar, from loose to tight (all chains are n-ary nodes, so that the tree is as deep as the nesting, not the length):

    relation  := sets (("=" | "<" | "≤" | …) sets)*
    sets      := quotient (("∪" | "∩" | "∖") quotient)*
    quotient  := sum ("\\over" sum)?
    sum       := sign? product (("+" | "-" | "±" | "∓") product)*
    product   := signed (("*" | "/" | nothing) signed)*
    power     := postfix ("^" exponent)?
    postfix   := primary ("!" | "%" | "°")*
    primary   := number | variable | constant | function | bracket | \\frac | \\sqrt | matrix | |…|
"""

from __future__ import annotations

from collections.abc import Sequence

from veritune.grading.math import grammar
from veritune.grading.math.cursor import Cursor
from veritune.grading.math.limits import UnreadableError
from veritune.grading.math.literals import read_number, repeating, spread_letters, visible_period
from veritune.grading.math.nodes import Node, constant, is_plain_integer, letter, negate, number
from veritune.grading.math.tokens import Token
from veritune.grading.math.vocabulary import CONSTANT_WORDS, FUNCTIONS, GREEK_LETTERS


def parse(tokens: Sequence[Token]) -> Node:
    """The tree of one formula; raises UnreadableError unless every token is used."""
    parser = _Parser(spread_letters(tokens))
    try:
        tree = parser.relation()
    except RecursionError as error:  # the caller may already stand deep in the stack
        raise UnreadableError("nested too deep") from error
    if parser.position != parser.count:
        raise UnreadableError(f"unexpected {parser.peek().text!r}")
    return tree


class _Parser(Cursor):
    """One method for each rule of the grammar."""

    # Relations and sets ----------------------------------------------------------------------------------------

    def relation(self) -> Node:
        first = self.sets()
        token = self.peek()
        if token.kind == "command" and token.text == "in":
            self.take()
            return Node("member", (first, self.sets()))
        operators, sides = [], [first]
        while token.kind in ("sign", "command") and token.text in grammar.RELATIONS:
            self.take()
            operators.append(grammar.RELATIONS[token.text])
            sides.append(self.sets())
            token = self.peek()
        return Node("relation", tuple(sides), tuple(operators)) if operators else first

    def sets(self) -> Node:
        left = self.quotient()
        while True:
            token = self.peek()
            if token.kind != "command" or token.text not in grammar.SET_OPERATIONS:
                return left
            kind = grammar.SET_OPERATIONS[self.take().text]
            right = self.quotient()
            if kind == left.kind == "union":
                left = Node("union", (*left.children, right))
            else:
                self.deeper()
                left = Node(kind, (left, right))

    def quotient(self) -> Node:
        r"""TeX's `1 \over 2` and `n \choose 2`, which divide all of their group."""
        top = self.sum()
        if self.accept("over", "command"):
            return Node("div", (top, self.sum()), "frac")
        return Node("binomial", (top, self.sum())) if self.accept("choose", "command") else top

    # Arithmetic ------------------------------------------------------------------------------------------------

    def sum(self) -> Node:
        terms: list[Node] = []
        token = self.peek()
        if token.text in ("pm", "mp") and token.kind == "command":
            self.take()
            terms.append(Node("sign choice", (self.product(),), token.text))
        else:
            terms.append(self.product())
        while True:
            token = self.peek()
            if token.kind == "sign" and token.text == "+":
                self.take()
                terms.append(self.product())
            elif token.kind == "sign" and token.text == "-":
                self.take()
                terms.append(negate(self.product()))
            elif token.kind == "command" and token.text in ("pm", "mp"):
                self.take()
                terms.append(Node("sign choice", (self.product(),), token.text))
            else:
                return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        factors = [self.signed()]
        operator = "mul"
        divisions = 0
        while True:
            token = self.peek()
            if token.kind == "sign" and token.text == "*":
                self.take()
                factors.append(self.signed())
            elif token.kind == "sign" and token.text in ("/", "÷"):
                self.take()
                divisions += 1
                self.deeper()
                numerator = factors[0] if len(factors) == 1 else Node(operator, tuple(factors))
                factors = [Node("div", (numerator, self.signed()), token.text)]
            elif self.starts_factor(token):
                operator = "juxtapose"  # kept to the end: `2*3(4)` is no plain arithmetic either
                factors.append(self.power())
            else:
                self.depth -= divisions
                return factors[0] if len(factors) == 1 else Node(operator, tuple(factors))

    def starts_factor(self, token: Token) -> bool:
        if token.kind in ("number", "word"):
            return True
        if token.kind == "sign":
            return token.text in "([{√" or (token.text == "|" and self.bars_open == 0)
        if token.kind != "command":
            return False
        return token.text not in grammar.NOT_FACTORS and token.text not in grammar.RELATIONS

    def signed(self) -> Node:
        negative = False
        while self.peek().kind == "sign" and self.peek().text in ("+", "-"):
            negative ^= self.take().text == "-"
        factor = self.power()
        return negate(factor) if negative else factor

    def power(self) -> Node:
        base = self.postfix()
        if self.peek().kind == "sign" and self.peek().text in ("^", "**"):
            self.take()
            if self.peek().kind == "command" and self.peek().text == "circ":
                self.take()
                return Node("degrees", (base,))
            return Node("pow", (base, self.exponent()))
        return base

    def exponent(self) -> Node:
        self.deeper()
        result = self.signed()
        self.depth -= 1
        return result

    def postfix(self) -> Node:
        result = self.primary()
        levels = 0
        while True:
            token = self.peek()
            if token.kind == "sign" and token.text in ("!", "%"):
                self.take()
                result = Node("factorial" if token.text == "!" else "percent", (result,))
            elif token.kind == "command" and token.text == "circ":
                self.take()
                result = Node("degrees", (result,))
            else:
                self.depth -= levels
                return result
            self.deeper()
            levels += 1

    # Primaries -------------------------------------------------------------------------------------------------

    def primary(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return self.number(token)
        if token.kind == "word":
            return self.word(token.text)
        if token.kind == "sign":
            return self.bracketed(token.text)
        if token.kind == "command":
            return self.command(token.text)
        raise UnreadableError(f"unexpected {token.text!r}")

    def number(self, token: Token) -> Node:
        value = number(read_number(token.text))
        following = self.peek()
        if following.kind == "sign" and following.text == "_":
            self.take()
            return Node("numeral", (), (token.text, str(self.argument().value)))
        if "." in token.text:
            if following.text == "overline":
                self.take()
                return repeating(token.text, self.digits())
            if following.text == "..." and (period := visible_period(token.text)):
                self.take()
                return repeating(token.text.removesuffix(period), period)
            return value
        fraction = self.fraction_part(following)
        if fraction is None:
            return value
        return Node("mixed", (value, fraction))

    def fraction_part(self, following: Token) -> Node | None:
        """The proper fraction of a mixed number such as `3\\frac12` or `3 1/2`, if one comes next."""
        if following.kind == "command" and following.text == "frac":
            start = self.position
            self.take()
            top, bottom = self.argument(), self.argument()
            if is_plain_integer(top) and is_plain_integer(bottom) and top.value < bottom.value:
                return Node("div", (top, bottom), "frac")
            self.position = start
        elif (
            following.kind == "number"
            and following.spaced
            and self.peek(1).text == "/"
            and self.peek(2).kind == "number"
        ):
            numerator, denominator = following.text, self.peek(2).text
            if numerator.isdigit() and denominator.isdigit() and int(numerator) < int(denominator):
                self.position += 3
                return Node("div", (number(int(numerator)), number(int(denominator))), "/")
        return None

    def digits(self) -> str:
        braced = self.accept("{")
        token = self.take()
        if braced:
            self.expect("}")
        if token.kind != "number" or not token.text.isdigit():
            raise UnreadableError("expected digits")
        return token.text

    def word(self, text: str) -> Node:
        if text in FUNCTIONS:
            return self.function(text)
        if text in CONSTANT_WORDS:
            return constant("pi" if text == "pi" else "infinity")
        if text in GREEK_LETTERS:
            return self.subscripted(text)
        if text == "f" and self.peek().text == "(":
            return Node("function", tuple(self.function_arguments(text)), text)
        if len(text) == 1:
            return self.subscripted(text)
        raise UnreadableError(f"{text!r} is a word")

    def subscripted(self, name: str) -> Node:
        """A variable with whatever subscript and primes follow it; the parts become its name."""
        if self.accept("_"):
            if self.accept("{"):
                start = self.position
                while self.position < self.count and self.peek().text != "}":
                    self.position += 1
                parts = [token.text for token in self.tokens[start : self.position]]
                self.expect("}")
            else:
                parts = [self.take().text]
            return self.primed(name + "_" + "".join(parts))
        return self.primed(name)

    def primed(self, name: str) -> Node:
        while self.accept("'"):
            name += "'"
        return letter(name)

    def bracketed(self, opener: str) -> Node:
        if opener == "√":
            self.deeper()
            radicand = self.postfix()
            self.depth -= 1
            return Node("root", (radicand, number(2)))
        if opener == "|":
            self.bars_open += 1
            inner = self.nested()
            self.bars_open -= 1
            self.expect("|")
            return Node("abs", (inner,))
        if opener in ("(", "["):
            return self.group(opener)
        if opener == "{":
            return self.braces()
        raise UnreadableError(f"unexpected {opener!r}")

    def nested(self) -> Node:
        self.deeper()
        inner = self.sets()
        self.depth -= 1
        return inner

    def items(self) -> list[Node]:
        bars, self.bars_open = self.bars_open, 0
        result = [self.nested()]
        while self.accept(","):
            result.append(self.nested())
        self.bars_open = bars
        return result

    def group(self, opener: str) -> Node:
        is_column = opener == self.peek().text == "["  # [[1],[2]], where a bracket around one number is no grouping
        items = self.items()
        closer = self.take().text
        if closer not in (")", "]"):
            raise UnreadableError(f"{opener!r} is closed by {closer!r}")
        if len(items) > 1:
            flat = all(item.kind != "tuple" for item in items)
            if is_column and flat and self.peek(-2).text == closer == "]":
                return Node("matrix", tuple(Node("row", (item,)) for item in items))
            return Node("tuple", tuple(items), opener + closer)
        if opener + closer not in ("()", "[]"):
            raise UnreadableError("a bracket is closed by one of another kind")
        return items[0]

    def braces(self) -> Node:
        if self.accept("}"):
            if self.count > 2:
                raise UnreadableError("empty braces")
            return Node("set", ())
        items = self.items()
        self.expect("}")
        return items[0] if len(items) == 1 else Node("set", tuple(items))

    def argument(self) -> Node:
        r"""LaTeX's argument of a command: a brace group, or one token of which a number gives a single digit."""
        if self.accept("{"):
            inner = self.nested()
            self.expect("}")
            return inner
        token = self.peek()
        if token.kind == "number" and token.text.isdigit() and len(token.text) > 1:
            self.tokens = self.tokens[:]
            self.tokens[self.position] = Token("number", token.text[1:], False)
            return number(int(token.text[0]))
        self.deeper()
        result = self.primary()
        self.depth -= 1
        return result

    def command(self, name: str) -> Node:
        if name in grammar.CONSTANT_COMMANDS:
            return grammar.CONSTANT_COMMANDS[name]
        if name in GREEK_LETTERS:
            return self.subscripted(name)
        if name == "sqrt":
            return self.radical()
        if name in FUNCTIONS:
            return self.function(name)
        if name in grammar.TWO_ARGUMENTS:
            written = "frac" if name == "frac" else None
            return Node(grammar.TWO_ARGUMENTS[name], (self.argument(), self.argument()), written)
        if name in grammar.DECORATIONS:
            return Node("decorated", (self.argument(),), name)
        if name in ("boxed", "fbox"):
            return self.argument()
        if name in ("langle", "lfloor", "lceil"):
            return self.enclosed(name)
        if name == "{":
            return self.set()
        if name == "mathbb":
            return constant("set " + self.braced_word())
        if name == "begin":
            return self.matrix()
        raise UnreadableError(f"unknown command {name!r}")

    def braced_word(self) -> str:
        braced = self.accept("{")
        text = self.take().text
        if braced:
            self.expect("}")
        return text

    def radical(self) -> Node:
        index = number(2)
        if self.accept("["):
            index = self.nested()
            self.expect("]")
        token = self.peek()
        if token.kind == "number":
            self.take()
            return Node("root", (number(read_number(token.text)), index))
        if index.kind != "number":
            return Node("pow", (self.argument(), Node("div", (number(1), index), "/")))
        return Node("root", (self.argument(), index))

    def function(self, name: str) -> Node:
        self.deeper()
        parameters: tuple[Node, ...] = ()
        inverse = False
        power: Node | None = None
        if name == "log" and self.accept("_"):
            parameters = (self.argument(),)
        elif name in grammar.BASES_OF_LOG:
            name, parameters = "log", (grammar.BASES_OF_LOG[name],)
        if self.accept("^"):
            power = self.argument() if self.peek().text == "{" else self.signed()
            if power == number(-1) and name in ("sin", "cos", "tan", "cot", "sec", "csc"):
                inverse, power = True, None
        arguments = self.function_arguments(name)
        self.depth -= 1
        kind = "root" if name in ("sqrt", "cbrt") else "function"
        if kind == "root":
            parameters = (number(3 if name == "cbrt" else 2),)
        node = Node(kind, (*arguments, *parameters), None if kind == "root" else ("arc" if inverse else "") + name)
        return node if power is None else Node("pow", (node, power))

    def function_arguments(self, name: str) -> list[Node]:
        if self.peek().text in ("(", "[") and self.peek().kind == "sign":
            self.take()
            items = self.items()
            if self.take().text not in (")", "]"):
                raise UnreadableError("a function's bracket is not closed")
            return items
        if self.peek().text == "{":
            return [self.argument()]
        if name == "sqrt":
            return [self.postfix()]
        if name in ("max", "min", "gcd", "lcm"):
            raise UnreadableError(f"{name} needs brackets")
        factors = [self.signed()]
        while self.starts_factor(self.peek()) and self.peek().text not in FUNCTIONS and self.peek().text not in "([":
            factors.append(self.power())
        return [factors[0] if len(factors) == 1 else Node("juxtapose", tuple(factors))]

    # Containers ------------------------------------------------------------------------------------------------

    def set(self) -> Node:
        if self.accept("}", "command"):
            return Node("set", ())
        first = self.relation_inside()
        if self.accept("|") or self.accept(":"):
            condition = self.condition()
            self.expect("}", "command")
            return condition
        items = [first]
        while self.accept(","):
            items.append(self.relation_inside())
        self.expect("}", "command")
        return Node("set", tuple(items))

    def condition(self) -> Node:
        """The condition of a set-builder: relations joined by `or` or by `and`."""
        result = self.relation_inside()
        while (kind := grammar.CONNECTIVES.get(self.peek().text)) is not None:
            self.take()
            self.deeper()
            further = self.relation_inside()
            earlier = result.children if result.kind == kind and result.value == "or" else (result,)
            result = Node(kind, (*earlier, further), "or" if kind == "union" else None)
        return result

    def relation_inside(self) -> Node:
        self.deeper()
        bars, self.bars_open = self.bars_open, 1  # a bar here separates a set-builder's halves
        inner = self.relation()
        self.bars_open = bars
        self.depth -= 1
        return inner

    def enclosed(self, name: str) -> Node:
        items = self.items()
        if self.take().text not in grammar.CLOSERS[name]:
            raise UnreadableError(f"{name!r} is not closed")
        if name == "langle":
            return Node("tuple", tuple(items), "()")
        return Node("function", tuple(items), "floor" if name == "lfloor" else "ceil")

    def matrix(self) -> Node:
        name = self.braced_word()
        if name not in grammar.MATRICES:
            raise UnreadableError(f"unknown environment {name!r}")
        if name == "array" and self.accept("{"):
            while self.position < self.count and self.take().text != "}":
                pass
        rows: list[Node] = []
        entries: list[Node] = []
        while True:
            if self.accept("hline", "command"):
                continue
            if self.accept("\\", "command"):
                rows.append(Node("row", tuple(entries)))
                entries = []
            elif self.accept("end", "command"):
                break
            else:
                entries.append(self.nested())
                self.accept("&")
        if self.braced_word() != name:
            raise UnreadableError("an environment is closed by another name")
        if entries:
            rows.append(Node("row", tuple(entries)))
        if not rows or len({len(row.children) for row in rows}) != 1:
            raise UnreadableError("a matrix needs rows of one length")
        matrix = Node("matrix", tuple(rows))
        return Node("function", (matrix,), "det") if name == "vmatrix" else matrix
