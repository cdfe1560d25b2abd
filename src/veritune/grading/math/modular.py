"""The value of a tree modulo a large prime: equality of rational expressions of any size in linear time.

Variables, π and e stand for fixed residues and i for a square root of -1, so two rational expressions that agree
modulo two primes near 2^60 are equal but for a chance of about their degree in 2^120 (Schwartz, 1980; Zippel, 1979).
A radical or a function of an argument stands for a residue drawn from its argument's residue: agreement then still
proves equality, while disagreement proves nothing (sqrt(12) and 2 sqrt(3) disagree), which `opaque` reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.limits import MAX_FACTORIAL
from veritune.grading.math.nodes import Node

# Primes of the form 4k + 1 near 2^61 and 2^60, a square root of -1 for each, and Euler's totient applied again and
# again, which reduces a tower of exponents level by level (its last entries are powers of two).
_TOTIENTS = (
    (
        2305843009212693901, 2305843009212693900, 614891093211547200, 148496799478579200, 34649942261760000,
        7501428817920000, 1913407930368000, 463856467968000, 123695058124800, 32985348833280, 8796093022208,
    ),
    (
        1152921504594501253, 1152921504594501252, 354745078336769472, 107498508586894080, 27682973260185600,
        6232708900454400, 1315033086689280, 300578991243264, 100192997081088, 33397665693696, 11132555231232,
        3710851743744, 1236950581248, 412316860416, 137438953472,
    ),
)  # fmt: skip
_ROOTS_OF_MINUS_ONE = (785706466412931295, 41198574616991011)
FIELDS = (0, 1)
"""The two primes, by position."""


@dataclass(slots=True)
class Residue:
    """One evaluation: the prime it runs under, and whether a radical or function had to be taken as opaque."""

    field_index: int
    opaque: bool = field(default=False)

    def of(self, node: Node) -> int:
        """The residue of `node`. Raises ZeroDivisionError, or InexactError for what is no number."""
        prime = _TOTIENTS[self.field_index][0]
        kind = node.kind
        if kind == "number":
            value = node.value
            if isinstance(value, int):
                return value % prime
            return value.numerator * _inverse(value.denominator, prime) % prime
        if kind == "variable":
            return _hashed(node.value, prime)
        if kind == "constant":
            return self._constant(node.value, prime)
        if kind == "pow":
            return self._power(node, prime)
        if kind == "factorial":
            return self._factorial(node, prime)
        if kind in ("root", "function", "abs", "decorated", "binomial"):
            return self._opaque(node, prime)
        return _combine(kind, [self.of(child) for child in node.children], prime)

    def _constant(self, name: str, prime: int) -> int:
        if name == "i":
            return _ROOTS_OF_MINUS_ONE[self.field_index]
        if name in ("pi", "e"):
            return _hashed("constant " + name, prime)
        raise InexactError(name)

    def _power(self, node: Node, prime: int) -> int:
        base, exponent = self.of(node.children[0]), node.children[1]
        try:
            power = exact_value(exponent)
        except TooLargeError:
            if base == 0:
                raise InexactError("power") from None
            return pow(base, _tower(exponent, self.field_index, 1), prime)
        except InexactError:
            return self._opaque(node, prime)
        if isinstance(power, Fraction):
            return self._opaque(node, prime)
        if base == 0:
            if power <= 0:
                raise ZeroDivisionError
            return 0
        return pow(base, power % (prime - 1), prime)

    def _factorial(self, node: Node, prime: int) -> int:
        try:
            return int(exact_value(node)) % prime
        except (InexactError, TooLargeError):
            return self._opaque(node, prime)

    def _opaque(self, node: Node, prime: int) -> int:
        """A residue that equal arguments share; a rational value is used where there is one."""
        try:
            value = exact_value(node)
        except (InexactError, TooLargeError):
            self.opaque = True
            arguments = [str(self.of(child)) for child in node.children]
            return _hashed(" ".join((node.kind, str(node.value), *arguments)), prime)
        return value.numerator * _inverse(value.denominator, prime) % prime


def _combine(kind: str, operands: list[int], prime: int) -> int:
    if kind in ("add", "mixed"):
        return sum(operands) % prime
    if kind == "neg":
        return -operands[0] % prime
    if kind in ("mul", "juxtapose"):
        product = 1
        for operand in operands:
            product = product * operand % prime
        return product
    if kind == "div":
        return operands[0] * _inverse(operands[1], prime) % prime
    if kind == "percent":
        return operands[0] * _inverse(100, prime) % prime
    if kind == "degrees":
        return operands[0] * _hashed("constant pi", prime) * _inverse(180, prime) % prime
    raise InexactError(kind)


def _inverse(value: int, prime: int) -> int:
    if value % prime == 0:
        raise ZeroDivisionError
    return pow(value, -1, prime)


@lru_cache(maxsize=4096)
def _hashed(name: str, prime: int) -> int:
    return (
        int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest(), "big") % (prime - 2) + 1
    )


def _tower(node: Node, field_index: int, level: int) -> int:
    """An exponent too large to compute, as a number with the same effect modulo the prime.

    Euler's theorem in its general form: b^e ≡ b^(e mod φ(m) + φ(m)) (mod m) for every e ≥ log2(m), which every
    exponent larger than MAX_BITS bits is. Only sums, products and powers of positive integers are read.
    """
    totients = _TOTIENTS[field_index]
    if level >= len(totients):
        raise InexactError("tower of exponents")
    modulus = totients[level]
    return _large_residue(node, field_index, level, modulus) + modulus


def _large_residue(node: Node, field_index: int, level: int, modulus: int) -> int:
    if node.kind == "number" and isinstance(node.value, int) and node.value > 0:
        return node.value % modulus
    if node.kind == "factorial":
        return _large_factorial(node, modulus)
    if node.kind == "pow":
        base = _large_residue(node.children[0], field_index, level, modulus)
        try:
            exponent = exact_value(node.children[1])
        except TooLargeError:
            return pow(base, _tower(node.children[1], field_index, level + 1), modulus)
        if isinstance(exponent, int) and exponent >= 0:
            return pow(base, exponent, modulus)
    elif node.kind in ("mul", "juxtapose", "add"):
        residues = [_large_residue(child, field_index, level, modulus) for child in node.children]
        return (sum(residues) if node.kind == "add" else math.prod(residues)) % modulus
    raise InexactError(node.kind)


def _large_factorial(node: Node, modulus: int) -> int:
    argument = exact_value(node.children[0])
    if isinstance(argument, int) and 0 <= argument <= MAX_FACTORIAL:
        return math.factorial(argument) % modulus
    raise InexactError("factorial")
