"""Labelled pairs made by rules: what is right by an identity, and what is wrong by a change that a number shows.

Every pair of functions comes with both sides in plain Python, so that `witness` can hold the label without the judge.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import NamedTuple

Function = Callable[..., float]


class Case(NamedTuple):
    """One answer, its gold answer and whether it is right."""

    family: str
    answer: str
    gold: str
    right: bool


class Functions(NamedTuple):
    """Two functions in LaTeX and in Python; `parameters` are points where a wrong one may show."""

    family: str
    answer: str
    gold: str
    right: bool
    answer_function: Function
    gold_function: Function
    variables: int = 1
    parameters: tuple[float, ...] = ()


def shifted(name: str, shift: Fraction | int) -> str:
    """`x - 3` or `x + \\frac12`, or `x` alone."""
    if shift == 0:
        return name
    return f"{name} {'+' if shift > 0 else '-'} {fraction(abs(shift))}"


def fraction(value: Fraction | int) -> str:
    value = Fraction(value)
    sign = "-" if value < 0 else ""
    if value.denominator == 1:
        return str(value)
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def some(generator: random.Random, largest: int = 40) -> Fraction:
    """A number that is not 0, whole two times of three."""
    return Fraction(generator.choice((1, -1)) * generator.randint(1, largest), generator.choice((1, 1, 2, 3)[:3]))


def kinks(generator: random.Random) -> Iterator[Functions]:
    """Absolute values and their relatives against what they are on one side of a kink only."""
    a, b = generator.choice("xtyn"), generator.choice("mkpq")
    p, q = some(generator), some(generator)
    low, high = sorted((p, p + abs(q)))
    whole, scale = abs(p.numerator), generator.randint(2, 9)
    moved = p + Fraction(1, generator.choice((10, 100, 1000)))
    at = tuple(float(sign * value) for value in (p, q, low, high) for sign in (1, -1))

    def pair(answer: str, gold: str, value: Function, other: Function | None = None, variables: int = 1) -> Functions:
        return Functions("kinks", answer, gold, other is None, value, other or value, variables, at)

    def distance(x: float) -> float:
        return abs(x - p)

    def two_distances(x: float) -> float:
        return abs(x - low) + abs(x - high)

    def difference(x: float, y: float) -> float:
        return scale * abs(x - y)

    inner, outer = shifted(a, -p), f"{fraction(p)} - {a}"
    to_low, to_high = f"|{shifted(a, -low)}|", f"|{shifted(a, -high)}|"
    linear = f"- {fraction(2 * p)}" if p > 0 else f"+ {fraction(-2 * p)}"
    square = rf"\sqrt{{{a}^2 {linear}{a} + {fraction(p * p)}}}"
    forms = f"|{outer}|", square, rf"\sqrt{{({inner})^2}}", rf"\sqrt{{({outer})^2}}", rf"\max({inner}, {outer})"
    for form in forms:
        yield pair(form, rf"\left|{inner}\right|", distance)
        side = generator.choice((1, -1))
        yield pair(inner if side > 0 else outer, form, lambda x, side=side: side * (x - p), distance)
    yield pair(f"|{shifted(a, -moved)}|", square, lambda x: abs(x - moved), distance)
    yield pair(rf"{to_high} + \sqrt{{({shifted(a, -low)})^2}}", f"{to_low} + {to_high}", two_distances)
    yield pair(fraction(high - low), f"{to_low} + {to_high}", lambda x: high - low, two_distances)
    yield pair(shifted(f"2{a}", -low - high), f"{to_low} + {to_high}", lambda x: 2 * x - low - high, two_distances)
    parabola, factors = f"|{whole**2} - {a}^2|", rf"|{a} - {whole}| \cdot |{a} + {whole}|"
    yield pair(factors, parabola, lambda x: abs(whole**2 - x * x))
    yield pair(parabola[1:-1], parabola, lambda x: whole**2 - x * x, lambda x: abs(whole**2 - x * x))
    yield pair(f"||{a}| - {whole}|", f"|{a}| - {whole}", lambda x: abs(abs(x) - whole), lambda x: abs(x) - whole)
    middle = rf"\frac{{{a} + {whole} + |{a} - {whole}|}}{{2}}"
    yield pair(rf"\max({a}, {whole})", middle, lambda x: max(x, whole))
    yield pair(a, rf"\max({a}, {-whole})", lambda x: x, lambda x: max(x, -whole))
    squared = rf"\sqrt{{{scale**2}{a}^2 - {2 * scale**2}{a}{b} + {scale**2}{b}^2}}"
    yield pair(f"{scale}|{b} - {a}|", squared, difference, None, 2)
    yield pair(f"{scale}({a} - {b})", squared, lambda x, y: scale * (x - y), difference, 2)
    yield pair(f"|{scale}{b} - {scale}{a}|", rf"{scale}|{a} - {b}|", difference, None, 2)
    yield pair(f"|{a}| + |{b}|", f"|{a} + {b}|", lambda x, y: abs(x) + abs(y), lambda x, y: abs(x + y), 2)
    yield pair(rf"\lceil {a} \rceil - 1", rf"\lfloor {a} \rfloor", lambda x: math.ceil(x) - 1, math.floor)
    yield pair(rf"\lfloor {a} + {whole} \rfloor", rf"\lfloor {a} \rfloor + {whole}", lambda x: math.floor(x) + whole)


def pieces(generator: random.Random) -> Iterator[Functions]:
    """Sums of several absolute values against the linear functions that they are between two kinks."""
    name, count = generator.choice("xtyn"), generator.randint(1, 4)
    corners = tuple(sorted(Fraction(corner, 4) for corner in generator.sample(range(-200, 200), count)))
    weights = [generator.choice((1, -1)) * generator.randint(1, 5) for _ in corners]
    slope, shift = generator.randint(-4, 4), generator.randint(-20, 20)

    def value(x: float, at: tuple[Fraction, ...]) -> float:
        return sum(w * abs(x - c) for w, c in zip(weights, at, strict=True)) + slope * x + shift

    def written(corner: Fraction) -> str:
        inner = shifted(name, -corner)
        negative = f"{fraction(corner)} - {name}"
        halves = rf"\max({inner}, {negative})"
        return generator.choice((f"|{inner}|", rf"\left|{negative}\right|", rf"\sqrt{{({inner})^2}}", halves))

    def text(at: tuple[Fraction, ...]) -> str:
        terms = [f"{w:+d}{written(c)}" for w, c in zip(weights, at, strict=True)]
        terms += [f"{slope:+d}{name}", f"{shift:+d}"]
        generator.shuffle(terms)
        return "".join(terms).lstrip("+")

    def pair(answer: str, right: bool, answered: Function) -> Functions:
        return Functions("pieces", answer, gold, right, answered, total, 1, tuple(map(float, corners)))

    gold = text(corners)
    total = partial(value, at=corners)
    yield pair(text(corners), True, total)
    left = generator.randint(0, count)  # corners to the left of the piece that is taken for the whole
    signs = [1] * left + [-1] * (count - left)
    steep = slope + sum(w * sign for w, sign in zip(weights, signs, strict=True))
    level = shift - sum(w * sign * c for w, sign, c in zip(weights, signs, corners, strict=True))
    straight = f"{steep}{name} {'-' if level < 0 else '+'} {fraction(abs(level))}"
    yield pair(straight, False, lambda x: steep * x + level)
    moved = (corners[0] - Fraction(1, generator.choice((2, 8, 64))), *corners[1:])
    yield pair(text(moved), False, partial(value, at=moved))
    yield pair(text(corners), True, total)


def nowhere(value: Callable[[], float]) -> float:
    """The value, or NaN where there is no real one."""
    try:
        return value()
    except (ValueError, ZeroDivisionError):
        return math.nan


def domains(generator: random.Random) -> Iterator[Functions]:
    """Radicals, logarithms and exponentials: identities that keep the domain, and those that do not."""
    x, y = generator.choice(("xy", "ab", "uv"))
    k, n, m = generator.randint(2, 12), generator.randint(2, 7), generator.choice((3, 5, 7))
    low, high = sorted(generator.sample(range(-60, 60), 2))

    def pair(answer: str, gold: str, value: Function, other: Function | None = None, variables: int = 1) -> Functions:
        return Functions(
            "domains", answer, gold, other is None, value, other or value, variables, (float(low), float(high))
        )

    root, log, sin, e = math.sqrt, math.log, math.sin, 2 * n
    gold = rf"\sqrt{{{k * k * n}{x}}}"
    yield pair(rf"{k}\sqrt{{{n}{x}}}", gold, lambda v: k * root(n * v))
    yield pair(rf"{k * k}\sqrt{{{n}{x}}}", gold, lambda v: k * k * root(n * v), lambda v: k * root(n * v))
    yield pair(rf"{k}{x}\sqrt{{{x}}}", rf"\sqrt{{{k * k}{x}^3}}", lambda v: k * v * root(v))
    yield pair(rf"{k}{x}", rf"\sqrt{{{k * k}{x}^2}}", lambda v: k * v, lambda v: k * abs(v))
    product = rf"\sqrt{{{x}}}\sqrt{{{y}}}"
    yield pair(product, rf"\sqrt{{{x}{y}}}", lambda v, w: root(v) * root(w), lambda v, w: root(v * w), 2)
    first, second = shifted(x, -low), shifted(x, -high)
    gold = rf"\sqrt{{({first})({second})}}"
    joint = lambda v: root((v - low) * (v - high))  # noqa: E731
    yield pair(rf"\sqrt{{{first}}}\sqrt{{{second}}}", gold, lambda v: root(v - low) * root(v - high), joint)
    gold = rf"\frac{{1}}{{\sqrt{{{first}}} - \sqrt{{{second}}}}}"
    total = lambda v: (root(v - low) + root(v - high)) / (high - low)  # noqa: E731
    yield pair(rf"\frac{{\sqrt{{{first}}} + \sqrt{{{second}}}}}{{{high - low}}}", gold, total)
    wrong = lambda v: (root(v - low) - root(v - high)) / (high - low)  # noqa: E731
    yield pair(rf"\frac{{\sqrt{{{first}}} - \sqrt{{{second}}}}}{{{high - low}}}", gold, wrong, total)
    yield pair(rf"\ln {k} + \ln {x}", rf"\ln({k}{x})", lambda v: log(k) + log(v))
    yield pair(rf"\ln {k} \cdot \ln {x}", rf"\ln({k}{x})", lambda v: log(k) * log(v), lambda v: log(k * v))
    yield pair(rf"{m}\ln {x}", rf"\ln({x}^{m})", lambda v: m * log(v))
    yield pair(rf"{e}\ln {x}", rf"\ln({x}^{{{e}}})", lambda v: e * log(v), lambda v: e * log(abs(v)))
    yield pair(rf"{e}\ln|{x}|", rf"\ln({x}^{{{e}}})", lambda v: e * log(abs(v)))
    yield pair(rf"\ln {x} + \ln {y}", rf"\ln({x}{y})", lambda v, w: log(v) + log(w), lambda v, w: log(v * w), 2)
    gold = rf"\frac{{\ln {x}}}{{\ln {k}}}"
    yield pair(rf"\log_{{{k}}} {x}", gold, lambda v: log(v) / log(k))
    yield pair(rf"\log_{{{k + 1}}} {x}", gold, lambda v: log(v) / log(k + 1), lambda v: log(v) / log(k))
    gold = rf"{k}^{{{x} + {n}}}"
    yield pair(rf"{k**n} \cdot {k}^{{{x}}}", gold, lambda v: float(k) ** (v + n))
    yield pair(rf"{k**n} + {k}^{{{x}}}", gold, lambda v: k**n + float(k) ** v, lambda v: float(k) ** (v + n))
    gold = rf"\sqrt[{m}]{{{x}^2}}"
    yield pair(rf"{x}^{{2/{m}}}", gold, lambda v: (v * v) ** (1 / m))
    yield pair(rf"{x}^{{{m}/2}}", gold, lambda v: root(v) ** m, lambda v: (v * v) ** (1 / m))
    gold, waves = rf"\sin({2 * k}{x})", rf"\sin({k}{x})\cos({k}{x})"
    yield pair("2" + waves, gold, lambda v: sin(2 * k * v))
    yield pair(waves, gold, lambda v: sin(2 * k * v) / 2, lambda v: sin(2 * k * v))
    gold = rf"\sqrt{{1 - \cos^2({k}{x})}}"
    yield pair(rf"|\sin({k}{x})|", gold, lambda v: abs(sin(k * v)))
    yield pair(rf"\sin({k}{x})", gold, lambda v: sin(k * v), lambda v: abs(sin(k * v)))
    answer = rf"\arctan({k}{x}) + \arctan\frac{{1}}{{{k}{x}}}"
    quarter = lambda v: math.pi / 2  # noqa: E731
    yield pair(answer, r"\frac{\pi}{2}", lambda v: math.atan(k * v) + math.atan(1 / (k * v)), quarter)
    yield pair(x, rf"\arcsin(\sin {x})", lambda v: v, lambda v: math.asin(sin(v)))
    yield pair(rf"{low} + e^{{\ln {x}}}", shifted(rf"e^{{\ln {x}}}", low), lambda v: low + math.exp(log(v)))
    hyperbolic = lambda v: 2 * math.sinh(k * v) if abs(k * v) < 500 else 0.0  # noqa: E731
    yield pair(rf"e^{{{k}{x}}} - e^{{-{k}{x}}}", rf"2\sinh({k}{x})", hyperbolic)


def witness(functions: Functions) -> bool:
    """Whether plain Python sees the two differ at a point: by value, or because only one has a real value."""
    generator = random.Random(functions.answer + functions.gold)
    around = [value + step for value in functions.parameters for step in (-50, -1, -0.0004, 0, 0.0004, 1, 50)]
    line = [*around, *range(-4, 5), *(sign * generator.uniform(0.01, 7) for _ in range(24) for sign in (1, -1))]
    for value in line:
        point = (
            (value,) if functions.variables == 1 else (value, generator.choice((1, -1)) * generator.uniform(0.1, 60))
        )
        one = nowhere(lambda point=point: functions.answer_function(*point))  # type: ignore[misc]
        other = nowhere(lambda point=point: functions.gold_function(*point))  # type: ignore[misc]
        if math.isnan(one) != math.isnan(other) or abs(one - other) > 1e-9 * max(1, abs(one), abs(other)):
            return True
    return False


def decimal(value: Fraction) -> str:
    """The digits of a fraction whose denominator divides a power of ten."""
    sign, value = "-" if value < 0 else "", abs(value)
    places = next(count for count in range(40) if (value * 10**count).denominator == 1)
    digits = str(value * 10**places).rjust(places + 1, "0")
    return sign + (digits if places == 0 else f"{digits[:-places]}.{digits[-places:]}")


def scientific(value: Fraction, generator: random.Random) -> str:
    """`5 \\times 10^{-1}` in one of the ways in which people write it."""
    power = math.floor(math.log10(abs(value)) + 1e-12)
    mantissa = decimal(value / Fraction(10) ** power)
    times = generator.choice((r" \times ", r"\cdot", "*", r"\times"))
    exponent = f"{{{power}}}" if power < 0 or generator.random() < 0.7 else str(power)
    if generator.random() < 0.2:
        return f"{mantissa}e{power}"
    return f"10^{exponent}" if mantissa == "1" and generator.random() < 0.5 else f"{mantissa}{times}10^{exponent}"


def percentages(generator: random.Random) -> Iterator[Case]:
    """A proportion and its percentage, where at least one is in scientific notation."""
    value = Fraction(generator.choice((1, -1, 1)) * generator.randint(1, 999), 10 ** generator.randint(3, 6))
    sign = generator.choice((r"\%", "%", r" \%", " percent", r"\text{ percent}"))
    plain, powers = decimal(value), scientific(value, generator)
    hundredfold, hundredfold_powers = decimal(100 * value), scientific(100 * value, generator)
    for gold in (powers, scientific(value, generator), fraction(value)):
        yield Case("percentages", hundredfold_powers + sign, gold, True)
        yield Case("percentages", powers + sign, gold, False)
    for gold in (powers, scientific(value, generator)):
        yield Case("percentages", hundredfold + sign, gold, True)
        yield Case("percentages", plain + sign, gold, False)
        yield Case("percentages", decimal(10 * value) + sign, gold, False)
    yield Case("percentages", powers, hundredfold + r"\%", True)
    yield Case("percentages", powers, plain + r"\%", False)
    yield Case("percentages", hundredfold + sign, scientific(100 * value, generator) + r"\%", True)
    yield Case("percentages", scientific(value / 100, generator), plain + r"\%", True)


INFINITY = math.inf


class Interval(NamedTuple):
    """An interval of the line; an infinite end is open."""

    low: Fraction | float
    high: Fraction | float
    low_closed: bool
    high_closed: bool

    def brackets(self) -> str:
        low = r"-\infty" if self.low == -INFINITY else fraction(Fraction(self.low))
        high = r"\infty" if self.high == INFINITY else fraction(Fraction(self.high))
        return f"{'[' if self.low_closed else '('}{low}, {high}{']' if self.high_closed else ')'}"

    def inequality(self, generator: random.Random, name: str) -> str:
        below, above = (r"\le" if self.low_closed else "<"), (r"\le" if self.high_closed else "<")
        if self.low == -INFINITY:
            upper = fraction(Fraction(self.high))
            return f"{name} {above} {upper}" if generator.random() < 0.6 else f"{upper} {self._mirrored(above)} {name}"
        lower = fraction(Fraction(self.low))
        if self.high == INFINITY:
            return f"{name} {self._mirrored(below)} {lower}" if generator.random() < 0.6 else f"{lower} {below} {name}"
        return f"{lower} {below} {name} {above} {fraction(Fraction(self.high))}"

    @staticmethod
    def _mirrored(operator: str) -> str:
        return r"\ge" if operator == r"\le" else ">"


def intervals(generator: random.Random) -> tuple[Interval, Interval, Interval]:
    """One inside another, and one apart from both."""
    ends = sorted(generator.sample(range(-60, 60), 6))
    a, b, c, d, e, f = (Fraction(end, generator.choice((1, 1, 2))) for end in ends)
    a, b, c, d, e, f = sorted((a, b, c, d, e, f))
    while not a < b < c < d < e < f:
        return intervals(generator)
    closed = [generator.random() < 0.5 for _ in range(6)]
    kind = generator.randrange(3)
    outer = Interval(a if kind else -INFINITY, d, closed[0] and kind > 0, closed[1])
    inner = Interval(b if kind < 2 else a, c, closed[2] if kind < 2 else False, closed[3])
    if kind == 2 and (inner.low, inner.high) == (outer.low, outer.high):
        return intervals(generator)
    return outer, inner, Interval(e, INFINITY if closed[4] else f, closed[5], False)


def alternatives(generator: random.Random) -> Iterator[Case]:
    """Regions joined by `or`: a union where they lie apart, two answers where one lies in the other."""
    name = generator.choice("xty")
    outer, inner, apart = intervals(generator)
    join = generator.choice((r" \text{ or } ", " or ", r" \lor ", ", or "))

    def write(one: Interval, brackets: bool) -> str:
        return one.brackets() if brackets else one.inequality(generator, name)

    in_brackets = generator.random() < 0.4
    for gold in (outer, inner):
        first, second = generator.sample((outer, inner), 2)
        hedge = write(first, in_brackets) + join + write(second, in_brackets)
        yield Case("alternatives", hedge, gold.brackets(), False)
        yield Case("alternatives", hedge, gold.inequality(generator, name), False)
        both = rf"\{{{name} : {first.inequality(generator, name)} \text{{ or }} {second.inequality(generator, name)}\}}"
        yield Case("alternatives", both, gold.brackets(), False)
        said_twice = write(gold, in_brackets) + join + write(gold, in_brackets)
        yield Case("alternatives", said_twice, gold.brackets(), True)
        union = rf"{gold.brackets()} \cup {apart.brackets()}"
        parts = [write(gold, in_brackets), write(apart, in_brackets)]
        generator.shuffle(parts)
        yield Case("alternatives", join.join(parts), union, True)
        conditions = rf"{gold.inequality(generator, name)} \text{{ or }} {apart.inequality(generator, name)}"
        yield Case("alternatives", rf"\{{{name} \mid {conditions}\}}", union, True)
        yield Case(
            "alternatives", join.join([*parts, write(first, in_brackets), write(second, in_brackets)]), union, False
        )
    p, q = some(generator), some(generator)
    yield Case("alternatives", f"{fraction(p)} or {fraction(p)}", fraction(p), True)
    yield Case("alternatives", f"{fraction(p)}{join}{fraction(p + abs(q))}", fraction(p), False)


def digits_of_root(value: int, places: int) -> str:
    """The root of a number that is no square, cut after `places` decimals."""
    digits = str(math.isqrt(value * 100**places))
    return f"{digits[:-places]}.{digits[-places:]}"


def near_numbers(generator: random.Random) -> Iterator[Case]:
    """Irrational numbers against rational ones that share up to 39 digits, and against themselves in another form."""

    def case(answer: str, gold: str, right: bool) -> Case:
        return Case("near numbers", answer, gold, right)

    size = generator.randint(4, 18)
    n = generator.randint(10**size, 10 ** (size + 1))
    k = generator.randint(1, 9)
    yield case(str(n), rf"\sqrt{{{n * n + k}}}", False)
    yield case(rf"\frac{{1}}{{\sqrt{{{n * n + 1}}} - {n}}}", rf"\sqrt{{{n * n + 1}}} + {n}", True)
    yield case(f"{2 * n}", rf"\sqrt{{{n * n + 1}}} + {n}", False)
    yield case(rf"{k}\sqrt{{{n}}}", rf"\sqrt{{{k * k * n}}}", True)
    d = generator.choice((2, 3, 5, 6, 7, 10, 11, 13, 14, 15))
    places = generator.randint(12, 38)
    yield case(digits_of_root(d, places), rf"\sqrt{{{d}}}", False)
    yield case(rf"\frac{{{d}}}{{\sqrt{{{d}}}}}", rf"\sqrt{{{d}}}", True)
    unit = {2: (3, 2), 3: (2, 1), 5: (9, 4), 6: (5, 2), 7: (8, 3)}.get(d, (3, 2))
    d = d if d < 8 else 2
    top, bottom, power = 1, 0, generator.randint(8, 24)
    for _ in range(power):  # (u + v√d)^power = top + bottom √d, with top² - d bottom² = 1
        top, bottom = top * unit[0] + d * bottom * unit[1], top * unit[1] + bottom * unit[0]
    assert top * top - d * bottom * bottom == 1
    surd = rf"{unit[1]}\sqrt{{{d}}}" if unit[1] > 1 else rf"\sqrt{{{d}}}"
    yield case(rf"\frac{{{top}}}{{{bottom}}}", rf"\sqrt{{{d}}}", False)
    yield case(str(2 * top), rf"({unit[0]}+{surd})^{{{power}}}", False)
    yield case(rf"{top} + {bottom}\sqrt{{{d}}}", rf"({unit[0]}+{surd})^{{{power}}}", True)
    yield case(str(2 * top), rf"({unit[0]}+{surd})^{{{power}}} + ({unit[0]}-{surd})^{{{power}}}", True)
    p, q = generator.sample(range(2, 40), 2)
    yield case(rf"\sqrt{{{p}}} + \sqrt{{{q}}}", rf"\sqrt{{{p + q} + 2\sqrt{{{p * q}}}}}", True)
    yield case(rf"\sqrt{{{p}}} + \sqrt{{{q}}} + 10^{{-{places}}}", rf"\sqrt{{{p + q} + 2\sqrt{{{p * q}}}}}", False)
    yield case(rf"\pi + 10^{{-{places}}}", r"\pi", False)
    yield case(rf"e^{{\ln {n}}}", rf"\sqrt{{{n * n}}}", True)
    yield case(rf"\ln({n} + 10^{{-{places - size if places > size + 2 else 2}}})", rf"\ln {n}", False)
    yield case(rf"{k}\ln {n}", rf"\ln({n**k})", True)
