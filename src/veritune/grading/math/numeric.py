"""The complex value of a tree: with machine numbers to tell values apart, with many digits to hold them equal."""

from __future__ import annotations

import cmath
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.nodes import Node

NO_VALUE = (ZeroDivisionError, ValueError)
"""The expression is not defined: a division by zero, the logarithm of zero."""
NOT_TOLD = (InexactError, TooLargeError, OverflowError)
"""The value is too large, lost in rounding, or of a function that this module does not know."""
_MAX_LOG_MAGNITUDE = 1e9  # natural logarithm: larger values are refused before mpmath computes them
_MAX_MACHINE_ANGLE = 1e6  # the sine of a larger one has too few right digits
_LOSS = 1e-9  # a sum this much smaller than its largest term has lost what machine numbers know
_local = threading.local()


def precise_context(digits: int) -> Any:
    """This thread's own mpmath context: mpmath changes a context's precision while it works.

    After `evaluate`, `bits` is the size of the largest term that was added, since no sum is more precise than that, or
    of the largest integer that was read.
    """
    if not hasattr(_local, "context"):
        import mpmath  # a tenth of a second, and only radicals and transcendentals need it

        _local.context = mpmath.MPContext()
    _local.context.dps = digits
    _local.context.bits = 0
    return _local.context


def evaluate(node: Node, context: Any, values: Mapping[str, float]) -> Any:
    """The complex value of `node` where the variables have these values; `context` is `cmath` or a precise one.

    Raises one of NO_VALUE where it is not defined, one of NOT_TOLD where this context does not tell it.
    """
    result = compiled(node, context)
    return result(values) if callable(result) else result


def compiled(node: Node, context: Any) -> Any:
    """The function from the variables' values to the value of `node`; a plain value where there are no variables."""
    kind = node.kind
    if kind == "number":
        return _lift(node.value, context)
    if kind == "variable":
        name = node.value
        lift = complex if context is cmath else context.mpf
        return lambda values: lift(values[name])
    if kind == "constant":
        return _constant(node.value, context)
    if kind in ("factorial", "binomial"):
        return _exactly(node, context)
    rule = _RULES.get(kind)
    if rule is None:
        raise InexactError(kind)
    what = _odd_order(node.children[1]) if kind == "pow" else node.value
    parts = [compiled(child, context) for child in node.children]
    if not any(map(callable, parts)):
        return rule(what, parts, context)
    if len(parts) == 1:
        (only,) = parts
        return lambda values: rule(what, (only(values),), context)
    return lambda values: rule(what, [part(values) if callable(part) else part for part in parts], context)


def _lift(value: Any, context: Any) -> Any:
    if context is cmath:
        return complex(value)
    context.bits = max(context.bits, value.numerator.bit_length(), value.denominator.bit_length())
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


def _power(odd_order: Fraction | None, operands: Sequence[Any], context: Any) -> Any:
    base, exponent = operands
    if base == 0:
        if complex(exponent).real <= 0:
            raise ZeroDivisionError
        return base
    if context is not cmath:
        _guard(abs(complex(exponent)) * (0.7 * abs(context.mag(base)) + 1))
    if odd_order is not None and base.imag == 0 and base.real < 0:
        # x^(2/3) of a negative x is the real root's square, as for \sqrt[3]{x}.
        power = (-base) ** exponent
        return -power if odd_order.numerator % 2 else power
    return (base + 0) ** exponent


def _odd_order(exponent: Node) -> Fraction | None:
    """A fraction of an odd denominator greater than 1, else None."""
    try:
        value = exact_value(exponent)
    except (InexactError, TooLargeError, ZeroDivisionError):
        return None
    return value if isinstance(value, Fraction) and value.denominator % 2 else None


def _guard(log_magnitude: float) -> None:
    if not log_magnitude < _MAX_LOG_MAGNITUDE:
        raise OverflowError


def _root(what: Any, operands: Sequence[Any], context: Any) -> Any:
    radicand, degree = operands
    order = complex(degree)
    if order.imag or not order.real.is_integer() or not 2 <= order.real <= 1000:
        raise InexactError("root")
    if order.real == 2:
        return context.sqrt(radicand + 0)  # the zero makes -0.0 a plain zero: both sides of a cut are one
    if radicand == 0:
        return radicand
    if order.real % 2 and complex(radicand).imag == 0 and complex(radicand).real < 0:
        return -((-radicand) ** (1 / degree))
    return (radicand + 0) ** (1 / degree)


def _add(what: Any, operands: Sequence[Any], context: Any) -> Any:
    total = operands[0]
    for operand in operands[1:]:
        total = total + operand
    if context is cmath:
        if total and abs(total) < _LOSS * max(map(abs, operands)):
            raise InexactError("cancellation")
    else:
        context.bits = max(context.bits, 0, *[context.mag(operand) for operand in operands if operand])
    return total


def _multiply(what: Any, operands: Sequence[Any], context: Any) -> Any:
    product = operands[0]
    for operand in operands[1:]:
        product = product * operand
    return product


def _function(name: str, operands: Sequence[Any], context: Any) -> Any:
    argument = operands[0]
    if name in _TRIGONOMETRIC and len(operands) == 1:
        if context is not cmath:
            _guard(abs(complex(argument)))
        elif abs(argument) > _MAX_MACHINE_ANGLE:
            raise OverflowError
        return _TRIGONOMETRIC[name](context, argument + 0)
    if name == "log":
        base = operands[1] if len(operands) > 1 else _lift(10, context)
        if argument == 0 or base == 0:
            raise ZeroDivisionError
        return context.log(argument + 0) / context.log(base + 0)
    if name == "exp":
        _guard(abs(complex(argument)))
        return context.exp(argument)
    if name in ("floor", "ceil"):
        return _round(name, argument, context)
    if name in ("max", "min"):
        if any(abs(operand.imag) > 1e-12 * (1 + abs(operand)) for operand in operands):
            raise ValueError(f"the {name} of numbers that are not real")
        return (max if name == "max" else min)(operands, key=lambda operand: operand.real)
    raise InexactError(name)


def _round(name: str, argument: Any, context: Any) -> Any:
    nearest = _lift(round(complex(argument).real), context)
    if context is cmath:  # so close to a whole number, the rounding error decides
        if argument.imag or abs(argument) > 2**40 or abs(argument - nearest) < 1e-6:
            raise InexactError(name)
        return _lift((math.floor if name == "floor" else math.ceil)(argument.real), context)
    nearest = context.nint(argument.real)
    if argument.imag:
        raise InexactError(name)
    if abs(argument - nearest) < context.mpf(10) ** (-2 * context.dps // 3):
        return nearest
    return (context.floor if name == "floor" else context.ceil)(argument.real)


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

_RULES: dict[str, Callable[[Any, Sequence[Any], Any], Any]] = {
    "add": _add,
    "mixed": _add,
    "neg": lambda what, operands, context: 0 - operands[0],
    "mul": _multiply,
    "juxtapose": _multiply,
    "div": lambda what, operands, context: operands[0] / operands[1],
    "percent": lambda what, operands, context: operands[0] / 100,
    "degrees": lambda what, operands, context: operands[0] * _constant("pi", context) / 180,
    "abs": lambda what, operands, context: _lift(0, context) + abs(operands[0]),
    "pow": _power,
    "root": _root,
    "function": _function,
}
