"""Equality that a few points would miss: kinks, domains, cancellation, near-integers, percentages, nested regions."""

import pytest

from veritune.grading import is_equivalent

EQUAL = [
    (r"\sqrt{x^2-20x+100}", "|x-10|"),
    (r"\max(x,5)", r"\frac{x+5+|x-5|}{2}"),
    (r"|a-b|", r"\sqrt{a^2-2ab+b^2}"),
    (r"\sqrt{x-2000}", r"\frac{2\sqrt{x-2000}}{2}"),
    (r"x\sqrt{x}", r"\sqrt{x^3}"),
    (r"x^9\sqrt{x}", r"\sqrt{x^{19}}"),
    (r"\ln x\cdot\sqrt{x}", r"\ln(\max(x,x))\cdot|\sqrt{x}|"),
    (r"\min(\ln x,x)", r"\ln x"),
    (r"3\ln x", r"\ln(x^3)"),
    (r"x^{2/3}", r"\sqrt[3]{x^2}"),
    (r"(\sqrt{x})^2", "x"),
    (r"\frac{x}{\sqrt{x}}", r"\sqrt{x}"),
    (r"\frac{\sqrt{x}-1}{x-1}", r"\frac{1}{\sqrt{x}+1}"),
    (r"\sqrt{-x^2-1}", r"\sqrt{-1-x^2}"),
    (r"\cos x + i\sin x", "e^{ix}"),
    (r"\cosh^2 x-\sinh^2 x", "1"),
    (r"\sin^2 x+\cos^2 x-1", "0"),
    (r"\sqrt{2}(x+1)^{20}", r"\sqrt{2}(x^2+2x+1)^{10}"),
    (r"x^{2023}\sqrt{8}", r"2\sqrt{2}x^{2023}"),
    ("(-8)^{1/3}", "-2"),
    (r"\sqrt{12}-2\sqrt{3}", "0"),
    (r"\frac{1}{\sqrt{10^{40}+1}-10^{20}}", r"\sqrt{10^{40}+1}+10^{20}"),
    (r"\lfloor e^{\pi\sqrt{163}} \rfloor", "262537412640768743"),
    (r"50\%", r"5\times10^{-1}"),
    (r"5\times10^1\%", "0.5"),
    (r"50\sqrt{2}\%", r"\frac{\sqrt{2}}{2}"),
    ("2 < x or x > 2", "x > 2"),
    ("1/2 or 0.5", "0.5"),
    (r"(2,\infty)\cup(3,\infty)", r"(2,\infty)"),
    (r"\{|x|,\sqrt{x^2},1\}", r"\{1,|x|\}"),
]
DIFFERENT = [
    ("10-x", "|x-10|"),
    ("10-x", r"\sqrt{x^2-20x+100}"),
    ("10", "|x-5|+|x+5|"),
    ("9-x^2", "|9-x^2|"),
    ("a-b", "|a-b|"),
    ("|x|-3", "||x|-3|"),
    ("20000-x", "|x-20000|"),
    ("x^4-20.3x^3+104.02x^2-20.3x+103.02", "|x^4-20.3x^3+104.02x^2-20.3x+103.02|"),
    ("x+11", r"\min(\max(x,x)+11,10000)"),
    (r"\ln(\min(x,1))", r"\sqrt{|x-x|}+\min(x,x)"),
    ("x^3-x", "|x^3-x|"),
    (r"\lceil x \rceil-1", r"\lfloor x \rfloor"),
    (r"\sqrt{|x-2000|}", r"\sqrt{x-2000}"),
    (r"\ln x+\ln y", r"\ln(xy)"),
    (r"\sqrt{x}\sqrt{y}", r"\sqrt{xy}"),
    (r"\sqrt{x-1}\sqrt{x+1}", r"\sqrt{x^2-1}"),
    (r"2\sqrt{-1-x^2}", r"\sqrt{-x^2-1}"),
    (r"\arctan x+\arctan\frac1x", r"\frac{\pi}{2}"),
    (r"\frac{|x-10|e^{100x}}{e^{100x}}", "10-x"),
    (r"\frac{|x-10|e^{e^x}}{e^{e^x}}", "10-x"),
    ("|x-10|+10^{60}-10^{60}", "10-x"),
    ("|x-10|+e^{10^6}-e^{10^6}", "10-x"),
    ("262537412640768744", r"e^{\pi\sqrt{163}}"),
    ("10^{60}", r"\sqrt{10^{120}+1}"),
    (r"\sqrt{10^{60}+1}-10^{30}+\sqrt{2}", r"\sqrt{2}"),
    (r"\lfloor e^{\pi\sqrt{163}} \rfloor", "262537412640768744"),
    (r"0.5\%", r"5\times10^{-1}"),
    (r"5\times10^{-1}\%", "0.5"),
    (r"\frac{\sqrt{2}}{2}\%", r"\frac{\sqrt{2}}{2}"),
    ("x>2 or x>3", "x>2"),
    ("x>2, x>3", "x>3"),
    (r"x>2 or x\ge2", r"x\ge2"),
    ("(1,2) or (1,3)", "(1,3)"),
    (r"\{x : x>2 \lor x>3\}", r"(2,\infty)"),
    ("x<1 or x>2 or x>3", r"(-\infty,1)\cup(2,\infty)"),
    ("x<1 or y>2", "x<1 or x>2"),
    ("5 m or 5 cm", "5"),
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_equal(first: str, second: str) -> None:
    assert is_equivalent(first, second)
    assert " or " in first or is_equivalent(second, first)


@pytest.mark.parametrize(("first", "second"), DIFFERENT)
def test_different(first: str, second: str) -> None:
    assert not is_equivalent(first, second)
    assert not is_equivalent(second, first)


def test_a_percentage_is_worked_out_like_any_number() -> None:
    assert not is_equivalent(r"(20+30)\%", "0.5")
    assert is_equivalent("0.5", r"(20+30)\%")
