"""The complex value of a tree: with machine numbers to tell values apart, with 40 digits to hold them equal."""

from __future__ import annotations

import cmath
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.nodes import Node

DIGITS = 40
_MAX_LOG_MAGNITUDE = 600.0  # natural logarithm: values beyond e^600 are refused before they are computed
_local = threading.local()


def machine_context() -> Any:
    """The functions that `evaluate` needs, on Python's complex numbers."""
    return cmath


def precise_context() -> Any:
    """This thread's own mpmath context of 40 digits: mpmath changes a context's precision while it works."""
    if not hasattr(_local, "context"):
        import mpmath  # a tenth of a second, and only radicals and transcendentals need it

        _local.context = mpmath.MPContext()
        _local.context.dps = DIGITS
    return _local.context


def evaluate(node: Node, context: Any, variables: Mapping[str, float]) -> Any:
    """The complex value of `node` where the variables have these values.

    Raises InexactError for what is no number, ZeroDivisionError, OverflowError or ValueError for what has no value.
    """
    kind = node.kind
    if kind == "number":
        return _lift(node.value, context)
    if kind == "variable":
        return _lift(variables[node.value], context)
    if kind == "constant":
        return _constant(node.value, context)
    if kind in ("factorial", "binomial"):
        return _exactly(node, context)
    rule = _RULES.get(kind)
    if rule is None:
        raise InexactError(kind)
    return rule(node, [evaluate(child, context, variables) for child in node.children], context)


def _lift(value: Any, context: Any) -> Any:
    if context is cmath:
        return complex(value)
    if isinstance(value, float):
        return context.mpf(value)
    return context.mpf(value.numerator) / value.denominator


def _constant(name: str, context: Any) -> Any:
    if name == "i":
        return complex(0, 1) if context is cmath else context.mpc(0, 1)
    if name == "pi":
        return context.pi if context is cmath else +context.pi
    if name == "e":
        return context.e if context is cmath else +context.e
    raise InexactError(name)


def _exactly(node: Node, context: Any) -> Any:
    try:
        return _lift(exact_value(node), context)
    except TooLargeError:
        raise OverflowError from None


def _power(node: Node, operands: list[Any], context: Any) -> Any:
    base, exponent = operands
    if base == 0:
        if exponent == 0:
            raise ZeroDivisionError
        return base
    _guard(abs(complex(exponent)) * (abs(cmath.log(complex(base))) if base else 0.0))
    return base**exponent


def _guard(log_magnitude: float) -> None:
    if not log_magnitude < _MAX_LOG_MAGNITUDE:
        raise OverflowError


def _root(node: Node, operands: list[Any], context: Any) -> Any:
    radicand, degree = operands
    order = complex(degree)
    if order.imag or not order.real.is_integer() or not 2 <= order.real <= 1000:
        raise InexactError("root")
    if order.real == 2:
        return context.sqrt(radicand)
    if radicand == 0:
        return radicand
    if order.real % 2 and complex(radicand).imag == 0 and complex(radicand).real < 0:
        return -((-radicand) ** (1 / degree))
    return radicand ** (1 / degree)


def _add(node: Node, operands: list[Any], context: Any) -> Any:
    total = operands[0]
    for operand in operands[1:]:
        total = total + operand
    return total


def _multiply(node: Node, operands: list[Any], context: Any) -> Any:
    product = operands[0]
    for operand in operands[1:]:
        product = product * operand
    return product


def _function(node: Node, operands: list[Any], context: Any) -> Any:
    name = node.value
    argument = operands[0]
    if name == "log":
        base = operands[1] if len(operands) > 1 else _lift(10, context)
        return context.log(argument) / context.log(base)
    if name == "exp":
        _guard(abs(complex(argument)))
        return context.exp(argument)
    if name in _TRIGONOMETRIC and len(operands) == 1:
        _guard(abs(complex(argument)))
        return _TRIGONOMETRIC[name](context, argument)
    if name in ("floor", "ceil"):
        return _round(name, complex(argument), context)
    raise InexactError(name)


def _round(name: str, argument: complex, context: Any) -> Any:
    # Too close to a whole number, the rounding error decides: such a value is not decided here.
    if argument.imag or not abs(argument.real) < 2**40 or abs(argument.real - round(argument.real)) < 1e-6:
        raise InexactError(name)
    return _lift(math.floor(argument.real) if name == "floor" else math.ceil(argument.real), context)


_TRIGONOMETRIC: dict[str, Callable[[Any, Any], Any]] = {
    "sin": lambda context, x: context.sin(x),
    "cos": lambda context, x: context.cos(x),
    "tan": lambda context, x: context.tan(x),
    "cot": lambda context, x: 1 / context.tan(x),
    "sec": lambda context, x: 1 / context.cos(x),
    "csc": lambda context, x: 1 / context.sin(x),
    "sinh": lambda context, x: context.sinh(x),
    "cosh": lambda context, x: context.cosh(x),
    "tanh": lambda context, x: context.tanh(x),
    "arcsin": lambda context, x: context.asin(x),
    "arccos": lambda context, x: context.acos(x),
    "arctan": lambda context, x: context.atan(x),
    "arccot": lambda context, x: context.atan(1 / x),
    "arcsec": lambda context, x: context.acos(1 / x),
    "arccsc": lambda context, x: context.asin(1 / x),
}

_RULES: dict[str, Callable[[Node, list[Any], Any], Any]] = {
    "add": _add,
    "mixed": _add,
    "neg": lambda node, operands, context: -operands[0],
    "mul": _multiply,
    "juxtapose": _multiply,
    "div": lambda node, operands, context: operands[0] / operands[1],
    "percent": lambda node, operands, context: operands[0] / 100,
    "degrees": lambda node, operands, context: operands[0] * _constant("pi", context) / 180,
    "abs": lambda node, operands, context: _lift(0, context) + abs(operands[0]),
    "pow": _power,
    "root": _root,
    "function": _function,
}
