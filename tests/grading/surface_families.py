r"""Labelled pairs by rule: each family draws right and wrong answers from numbers, templates and word lists of its own.

A rule knows by construction what it writes: a right answer states the gold's value in another form, a wrong one
changes the value, or the meaning of the words around it. No rule asks the grader.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from fractions import Fraction
from functools import partial

Rule = Callable[[random.Random], tuple[str, str]]
"""Draws (answer, gold)."""


def draw(rule: Rule, count: int, seed: str) -> list[tuple[str, str]]:
    """`count` different pairs of a rule, always the same for one seed."""
    generator = random.Random(seed)
    pairs: dict[tuple[str, str], None] = {}
    for _ in range(20 * count):
        pairs.setdefault(rule(generator))
        if len(pairs) == count:
            break
    return list(pairs)


def _listed(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


# Labels ------------------------------------------------------------------------------------------------------------

_VARIABLES = ["x", "y", "n", "r", "t", "k", r"\theta", "z", "u", "x_1", "w"]
_EXPRESSIONS = [
    "{v}+{a}", "{a}{v}+{b}", r"\pi {v}^2", "{v}^2-{a}", r"\frac{{{v}}}{{{a}}}", r"{a}\sqrt{{{v}}}", "{a}-{v}",
    "{v}({v}+{a})", "{a}{v}^2+{b}{v}", r"\frac{{{v}+{a}}}{{{b}}}", "{a}(1+{v})",
]  # fmt: skip
_FUNCTIONS = ["f", "g", "h", "P", "p", "A", "F"]
_PARAMETERS = ["x", "t", "s", "u", "z", "r", "w", "y"]


def _expression(generator: random.Random, name: str) -> str:
    template = generator.choice(_EXPRESSIONS)
    return template.format(v=name, a=generator.randint(2, 40), b=generator.randint(41, 80))


def _equality(generator: random.Random, label: str, value: str) -> str:
    return generator.choice(["{} = {}", "{}={}", "${}={}$", "{} ={}"]).format(label, value)


def label_right(generator: random.Random) -> tuple[str, str]:
    """Another variable's name before the value, or the same function of another variable."""
    if generator.random() < 0.5:
        label, name = generator.sample(_VARIABLES, 2)
        value = _expression(generator, name)
        label = generator.choice([label, "S", "V", "f(2)", r"\text{area}"])
        return _equality(generator, label, value), value
    function = generator.choice(_FUNCTIONS)
    old, new = generator.sample(_PARAMETERS, 2)
    state = generator.getstate()
    gold = f"{function}({old}) = {_expression(generator, old)}"
    generator.setstate(state)
    return _equality(generator, f"{function}({new})", _expression(generator, new)), gold


def label_wrong(generator: random.Random) -> tuple[str, str]:
    """An equation in place of its right side; a function of another variable, by another name, or of another value."""
    name = generator.choice(_VARIABLES)
    value = _expression(generator, name)
    kind = generator.randrange(5)
    if kind == 0:
        frame = generator.choice(
            ["{0} = {1}", "{0}={1}", "${0}={1}$", "{0} is {1}", "the value of {0} is {1}", "{0} equals {1}"]
        )
        return frame.format(name, value), value
    if kind == 1:
        return _equality(generator, value, name), value
    function, other = generator.sample(_FUNCTIONS, 2)
    old, new = generator.sample(_PARAMETERS, 2)
    value = _expression(generator, old)
    gold = f"{function}({old}) = {value}"
    if kind == 2:
        return _equality(generator, old, value), gold
    if kind == 3:
        return _equality(generator, f"{function}({new})", value), gold
    if function.lower() == other.lower() or generator.random() < 0.5:
        return _equality(generator, f"{function}({new})", _expression(generator, new) + "+100"), gold
    return _equality(generator, f"{other}({old})", value), gold


# Words after and before numbers --------------------------------------------------------------------------------------

_NOUNS = _listed(
    "apples marbles students eggs tickets pages stickers cookies boxes dollars cents meters hours minutes "
    "feet miles kilograms points people books cars chairs liters cups gallons grams inches years coins "
    "balloons pencils birds tiles rows stamps goals toys beads flowers seats triangles digits factors ways "
    "games questions seashells acres"
)
_ADJECTIVES = ["red", "blue", "large", "different", "more", "small", "new", "ripe"]
_SENTENCES = [
    "{}", "The answer is {}.", "the total is {}", "There are {}.", "She has {}.", "It takes {}", "So the answer is {}",
    "He needs {}.", "Answer: {}", "They sold {}", r"\text{{{}}}", "**{}**", "a total of {}",
]  # fmt: skip
_MULTIPLES = {
    "dozen": 12, "score": 20, "gross": 144, "hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9,
    "lakh": 10**5, "crore": 10**7, "trillion": 10**12, "dozens": 12, "hundreds": 100, "thousands": 1_000,
    "lakhs": 10**5,
}  # fmt: skip
_PARTS = {
    "per mille": 1_000, "permille": 1_000, "basis points": 10_000, "hundredths": 100, "tenths": 10,
    "thousandths": 1_000,
    "twelfths": 12, "twentieths": 20, "sevenths": 7, "millionths": 10**6, "elevenths": 11,
}  # fmt: skip
_CHANGES_AFTER = _listed(
    "squared|cubed|factorial|log|ln|sin|cos|logarithm|exponent|reciprocal|inverted|inverse|negated|negative|"
    "reversed|backwards|backward|upside down|excluded|excluding|not included|is excluded|removed|omitted|"
    "subtracted|in debt|owed|overdrawn|in the red|below zero|below|short|deficit|loss|debt|shortfall|"
    "decrease|less|fewer than x|doubled|tripled|halved|quadrupled|times x|times two|plus one|plus|minus one|"
    "or more|or less|or so|ish|something|maximum|at most|at least|in base six|in binary|binary|hexadecimal|"
    "in hex|octal|mod 7|modulo 7|recurring|repeating|percent less|fold|twofold|square|cubic|square root|"
    "thousandth|bn|grand|mil|zillion|googol|nope|not|never|wrong|incorrect|no|is wrong|false|rejected|"
    "cancelled|nullified|approximately|roughly|nearly|if x is even|unless x is 0|except 5|conjugate|"
    "transposed|mirrored|flipped|rotated|rounded|truncated|prime|to the power 3|raised to 2|derivative",
    "|",
)
_CHANGES_BEFORE = _listed(
    "log |ln |log of |sine of |a sine of |the logarithm of |square root of |the square of |a square of |"
    "sum of |the sum of |difference of |the product of |a loss of |loss of |a debt of |a deficit of |"
    "a decrease of |a shortfall of |a reduction of |minus |negative |- |the negative of |the opposite of |"
    "reciprocal of |inverse of |not |never |anything but |about |approximately |roughly |at least |at most |"
    "more than |less than |up to |almost |twice |half of |half |double |triple |a third of |a multiple of |"
    "a factor of |a power of |exponent |down |a drop of |everything except |without |less |under |over |"
    "maybe |probably |the derivative of |a fraction of |a percentage of |the factorial of |base |"
    "5 more than |the complement of |the cube of |an excess over ",
    "|",
)
_ONES = _listed(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
)
_TENS = _listed("zero ten twenty thirty forty fifty sixty seventy eighty ninety")


def in_words(number: int) -> str:
    """An integer below a million in English."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        return _TENS[number // 10] + ("-" + _ONES[number % 10] if number % 10 else "")
    scale, name = (1000, "thousand") if number >= 1000 else (100, "hundred")
    rest = number % scale
    return f"{in_words(number // scale)} {name}" + (f" {in_words(rest)}" if rest else "")


def noun_right(generator: random.Random) -> tuple[str, str]:
    """A number with what it counts."""
    number = generator.randint(2, 999)
    noun = generator.choice(_NOUNS)
    if generator.random() < 0.3:
        noun = f"{generator.choice(_ADJECTIVES)} {noun}"
    gold = generator.choice([f"{number}", f"{number}", f"{number} {noun}", rf"{number} \text{{ {noun}}}"])
    return generator.choice(_SENTENCES).format(f"{number} {noun}"), gold


def noun_wrong(generator: random.Random) -> tuple[str, str]:
    """A word that makes the number negative, another, a bound, or part of a computation."""
    number = generator.randint(2, 999)
    sentence = generator.choice(_SENTENCES[:7])
    gold = generator.choice([f"{number}", f"{number}", f"{number}.0", f"${number}$"])
    if generator.random() < 0.5:
        noun = generator.choice(["", "", "", "dollars ", "points "])
        return sentence.format(f"{number} {noun}{generator.choice(_CHANGES_AFTER)}"), gold
    return sentence.format(f"{generator.choice(_CHANGES_BEFORE)}{number}"), gold


def number_word_right(generator: random.Random) -> tuple[str, str]:
    """A number in words, multiplied or divided by a word."""
    kind = generator.randrange(4)
    number = generator.randint(1, 99) if kind else generator.randint(1, 999_999)
    written = generator.choice([str(number), in_words(number)])
    if kind == 0:
        return generator.choice(["{}", "The answer is {}.", r"\text{{{}}}"]).format(in_words(number)), str(number)
    if kind == 1:
        word = generator.choice(list(_MULTIPLES))
        return f"{written} {word}", str(number * _MULTIPLES[word])
    if kind == 2:
        word = generator.choice(list(_PARTS))
        value = Fraction(number, _PARTS[word])
        return f"{written} {word}", f"{value.numerator}/{value.denominator}"
    return generator.choice(["minus ", "negative "]) + in_words(number), str(-number)


def number_word_wrong(generator: random.Random) -> tuple[str, str]:
    """The number without its multiplier, divider or sign; words in a row that are no numeral."""
    kind = generator.randrange(4)
    number = generator.randint(2, 99)
    written = generator.choice([str(number), in_words(number)])
    if kind < 2:
        word = generator.choice(list(_MULTIPLES if kind else _PARTS))
        frame = generator.choice(["{} {}", "The answer is {} {}.", r"{}\text{{ {}}}", "{} {} exactly"])
        return frame.format(written, word), str(number)
    if kind == 2:
        return generator.choice(["minus ", "negative "]) + written, str(number)
    first, second = generator.randint(1, 9), generator.randint(1, 9)
    return f"{in_words(first)} {in_words(second)}", str(generator.choice([first + second, first, second]))


# LaTeX that only looks ----------------------------------------------------------------------------------------------

_STYLES = [
    r"\color{{red}}{{{}}}", r"\color{{red}} {}", r"{{\color{{blue}} {}}}", r"\textcolor{{blue}}{{{}}}", r"\fbox{{{}}}",
    r"\textcolor[rgb]{{1,0,0}}{{{}}}", r"\colorbox{{yellow}}{{{}}}", r"\fcolorbox{{red}}{{white}}{{{}}}",
    r"\emph{{{}}}", r"\framebox{{{}}}", r"\framebox[2cm]{{{}}}", r"\underline{{{}}}", r"\mathbf{{{}}}",
    r"\boldsymbol{{{}}}", r"\bm{{{}}}", r"{{\bf {}}}", r"\bf {}", r"\bf{{{}}}", r"\mathit{{{}}}", r"\mathsf{{{}}}",
    r"\mathtt{{{}}}", r"{{\large {}}}", r"\Huge{{{}}}", r"\displaystyle {}", r"\pmb{{{}}}", r"\uline{{{}}}",
    r"\scalebox{{1.2}}{{{}}}", r"\raisebox{{2pt}}{{{}}}", r"\ensuremath{{{}}}", r"\boxed{{\color{{red}}{{{}}}}}",
    r"\color{{red}}{{\mathbf{{{}}}}}", r"{} \tag{{1}}", r"{}\hspace{{1cm}}", r"\left. {} \right.",
    r"\begin{{equation}} {} \end{{equation}}", r"\begin{{aligned}} {} \end{{aligned}}", r"\bold{{{}}}", r"\text{{{}}}",
]  # fmt: skip
_NOT_STYLES = [
    r"\cancel{{{}}}", r"\bcancel{{{}}}", r"\sout{{{}}}", r"\phantom{{{}}}", r"\hphantom{{{}}}", r"\not{{{}}}",
    r"\sqrt{{{}}}", r"\overline{{{}}}+1", r"-\textcolor{{red}}{{{}}}", r"\textcolor{{red}}{{-{}}}", r"\tag{{{}}}",
    r"1+\mathbf{{{}}}", r"\color{{red}}{{{}}}\color{{blue}}{{1}}", r"\textcolor{{red}}{{{}}}^2", r"2^{{\bf {}}}",
    r"\mathbf{{{}}}!", r"\color{{red}}{{{}}} or \color{{red}}{{1}}", r"\label{{{}}}", r"\emph{{not {}}}",
    r"\fbox{{at least {}}}", r"\xout{{{}}}",
]  # fmt: skip


def _styled_gold(generator: random.Random) -> tuple[str, str]:
    """A value and a gold for it."""
    number = generator.randint(3, 9999)
    return generator.choice(
        [
            (str(number), str(number)),
            (str(number), str(number)),
            (rf"\frac{{{number}}}{{7}}", f"{number}/7"),
            (f"x={number}", str(number)),
            (rf"{number}\text{{ cm}}", str(number)),
            (rf"{number}\sqrt{{2}}", rf"{number}\sqrt{{2}}"),
            (f"({number}, 5)", f"({number},5)"),
            (f"x^2+{number}", f"{number}+x^2"),
        ]
    )


def style_right(generator: random.Random) -> tuple[str, str]:
    """A value in one or two styles."""
    value, gold = _styled_gold(generator)
    styled = generator.choice(_STYLES).format(value)
    if generator.random() < 0.3:
        styled = generator.choice(["${}$", r"\[{}\]", "The answer is {}.", r"\({}\)"]).format(styled)
    return styled, gold


def style_wrong(generator: random.Random) -> tuple[str, str]:
    """A value that is struck out, hidden or changed; another value in a style."""
    number = generator.randint(3, 9999)
    if generator.random() < 0.5:
        return generator.choice(_NOT_STYLES).format(number), str(number)
    return generator.choice(_STYLES).format(generator.choice([number + 1, -number, f"{number}0"])), str(number)


# Unicode ------------------------------------------------------------------------------------------------------------

_ALPHABETS = [0x1D400, 0x1D434, 0x1D468, 0x1D5A0, 0x1D5D4, 0x1D608, 0x1D63C, 0x1D670]
"""Where the mathematical capital A of each style stands; the small a follows 26 places later."""
_DIGIT_ZEROS = [0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6, 0xFF10]
_ASCII_SUPERSCRIPTS = str.maketrans("0123456789-+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺")
_ASCII_SUBSCRIPTS = str.maketrans("0123456789-+", "₀₁₂₃₄₅₆₇₈₉₋₊")


def _digits(generator: random.Random, text: str) -> str:
    zero = generator.choice(_DIGIT_ZEROS)
    return "".join(chr(zero + int(sign)) if sign.isdigit() else sign for sign in text)


def _letter(generator: random.Random, letter: str) -> str:
    if letter == "h":
        return "ℎ"
    return chr(generator.choice(_ALPHABETS) + 26 + ord(letter) - ord("a"))


def _unicode_pair(generator: random.Random, change: int) -> tuple[str, str]:
    """A formula in mathematical letters and digits for its ASCII form; `change` is added to its number."""
    number = generator.randint(2, 999)
    written = str(number + change)
    name = generator.choice("abcdfghkmnpqrstuvwxyz")
    top, bottom = generator.randint(1, 9), generator.randint(11, 97)
    fraction = f"{str(top + change).translate(_ASCII_SUPERSCRIPTS)}⁄{str(bottom).translate(_ASCII_SUBSCRIPTS)}"
    power = str(top + 1 + change).translate(_ASCII_SUPERSCRIPTS)
    styled, digits = _letter(generator, name), _digits(generator, written)
    answer, gold = generator.choice(
        [
            (digits, str(number)),
            (f"{styled}+{digits}", f"{name}+{number}"),
            (f"{styled} = {digits}", str(number)),
            (f"{digits}{styled}", f"{number}{name}"),
            (fraction, rf"\frac{{{top}}}{{{bottom}}}"),
            (f"{number}{fraction}", rf"\frac{{{number * bottom + top}}}{{{bottom}}}"),
            (f"-{fraction}", rf"-\frac{{{top}}}{{{bottom}}}"),
            (f"{styled}{power}+{number}", f"{name}^{{{top + 1}}}+{number}"),
            (f"{digits}％", f"{number}%"),
            (f"{digits}𝜋", rf"{number}\pi"),
            (f"（{digits}，{number}）", f"({number},{number})"),
            (f"{digits}㎝", f"{number} cm"),
            (f"{digits}㎡", rf"{number}\text{{ m}}^2"),
            (f"√{digits}", rf"\sqrt{{{number}}}") if number + change > 99 else (digits, str(number)),
        ]
    )
    return answer, gold


# Forms of numbers and conditions --------------------------------------------------------------------------------------

_DEGREES = [
    r"^{\text{o}}", "^o", "^{o}", r"^{\rm o}", r"^\mathrm{o}", r"^{\mathrm{o}}", r"^{\textrm{o}}", r"\degree", "∘", "°",
    "^∘", "^{∘}", "˚", "º", r"^{\circ}", r"^\circ", r"{}^\circ", r"\,^\circ", r" ^{\circ}", r"^{\text{∘}}", " degrees",
    r"\text{ degrees}", r"^{\mbox{o}}", " deg", r"\textdegree", r"^{\bf o}", "^{°}", r"\textsuperscript{o}",
    r"^{\text{deg}}", r"^\circ{}", " ^\\circ",
]  # fmt: skip


def form_right(generator: random.Random) -> tuple[str, str]:
    """Degrees, grouped digits, repeating decimals and excluded values in another form."""
    number = generator.randint(1, 359)
    kind = generator.randrange(4)
    if kind == 0:
        gold = generator.choice([rf"{number}^\circ", str(number), rf"{number}^{{\circ}}", f"{number} degrees"])
        return f"{number}{generator.choice(_DEGREES)}", gold
    if kind == 1:
        large = generator.randint(10**4, 10**9)
        comma = generator.choice([r",\!", r",\! ", r", \!", "{,}", r"\,", r"{,}\!", r"\!,\!", ",", "~", "{,} "])
        return f"{large:,}".replace(",", comma), generator.choice([str(large), f"{large:,}"])
    period = str(generator.randint(1, 989))
    if kind == 2:
        value = Fraction(int(period), 10 ** len(period) - 1)
        mark = generator.choice(
            [r".\overline{{{}}}", r".\overline {{{}}}", r".\bar{{{}}}", r"0.\overline{{{}}}", ".({})", "0.({})"]
        )
        return mark.format(period), f"{value.numerator}/{value.denominator}"
    sign = generator.choice(["≠", r"\not=", r" \not= ", r"\neq ", "!=", r"\ne ", "=\u0338", "<>", r"\not{=}", "=/="])
    return f"x{sign}{number}", rf"x\ne {number}"


def form_wrong(generator: random.Random) -> tuple[str, str]:
    """The same forms of another number, and forms that only look alike."""
    number = generator.randint(1, 359)
    kind = generator.randrange(4)
    if kind == 0:
        wrong = generator.choice(
            [
                f"{number + 1}{generator.choice(_DEGREES)}",
                f"{number}^0",
                f"{number}^{{10}}",
                f"{number}0^o",
                f"{number}'",
            ]
        )
        return wrong, rf"{number}^\circ"
    if kind == 1:
        large = generator.randint(10**6, 10**9)
        groups = f"{large:,}".split(",")
        wrong = [
            f"{large + 1:,}".replace(",", r",\! "),
            ", ".join(groups),
            r"\! ".join(groups[:2]),
            ",\\ ".join(groups),
        ]
        return generator.choice(wrong), str(large)
    period = str(generator.randint(1, 989))
    value = Fraction(int(period), 10 ** len(period) - 1)
    if kind == 2:
        wrong = generator.choice([f".{period}", f"0.{period}", rf"\overline{{{period}}}", rf"{period}.\overline{{3}}"])
        return wrong, f"{value.numerator}/{value.denominator}"
    sign = generator.choice(["=", r"\not= 1", r"\not<", r"\not>", "≥", r"\approx ", r"\not\le "])
    return f"x{sign}{number}", rf"x\ne {number}"


_NOTHING = [
    "no solution", "no solutions", r"\text{no solution}", "No solution.", "There is no solution.", r"\emptyset",
    "There are no solutions", "no real solution", r"\text{No real solutions}", "The equation has no solution.",
    r"\varnothing", r"\{\}", "∅", "the empty set", "null set", r"\text{The equation has no solutions}",
    r"\textbf{no solution}",
    r"\color{red}{\emptyset}", "{}", "**no solution**", "$\\emptyset$", "The system has no solution", "x = \\emptyset",
]  # fmt: skip
_SOMETHING = [
    "one solution", "infinitely many solutions", "0", "no", "solution", r"\{0\}", "not no solution",
    "two real solutions",
    "no solution or 1", "no solution, 2", "all real numbers", r"\{\emptyset\}", "maybe no solution", "none of these",
    "no solution except 3", "no integer solutions, 1/2", "no unique solution", "1", "no problem", "a solution",
]  # fmt: skip


def nothing_right(generator: random.Random) -> tuple[str, str]:
    """The empty set in words and in signs."""
    answer = generator.choice(_NOTHING)
    if generator.random() < 0.5:
        answer = generator.choice(["{}", " {}", "{} ", "{}\n", "The answer is {}", "The answer is: {}"]).format(
            answer.strip(".")
        )
    return answer, generator.choice([r"\emptyset", r"\varnothing", r"\text{no solution}", "no solution", r"\{\}"])


def nothing_wrong(generator: random.Random) -> tuple[str, str]:
    """Some solution in place of none, and none in place of some."""
    gold = generator.choice([r"\emptyset", r"\varnothing", r"\text{no solution}", "no solutions"])
    if generator.random() < 0.5:
        return generator.choice(["{}", "The answer is {}", "${}$"]).format(generator.choice(_SOMETHING)), gold
    return generator.choice(_NOTHING), generator.choice([str(generator.randint(0, 99)), r"\mathbb{R}", r"\{0\}", "yes"])


# Chinese --------------------------------------------------------------------------------------------------------------

_HAN_DIGITS = "零一二三四五六七八九"
_HAN_UNITS = _listed(
    "元 个 米 厘米 千米 公里 克 千克 公斤 小时 分钟 秒 天 年 岁 度 平方米 平方厘米 立方米 立方厘米 升 毫升 "
    "人 本 只 张 支 棵 辆 次 块 美元 吨 米/秒 千米/时 个苹果 本书 名学生 只鸡 条鱼 块钱 种方法 个月 间教室"
)
_HAN_FRAMES = [
    "答案是{}", "答案：{}", "答案为{}。", "{}", "{}。", "所以答案是{}。", "因此，{}", "x={}", "x等于{}", "解得x={}",
    "共{}",
    "一共有{}", "小明有{}", "结果是{}", "最终答案是{}", "答：{}", "故答案为{}", "最大值是{}", "它的面积是{}",
    "总共{}", "需要{}",
    "解：x={}", "\\text{{答案是}}{}", "三角形的周长为{}",
]  # fmt: skip
_HAN_CHANGES = [
    "{}万", "{}亿", "{}千", "{}百", "负{}", "约{}", "大约{}", "{}左右", "至少{}", "不是{}", "{}以上", "超过{}",
    "不到{}", "{}多",
    "{}的平方", "{}的2倍", "欠{}元", "亏损{}元", "{}个半", "第{}", "{}打", "千分之{}", "{}分之一", "不等于{}",
    "大于{}", "{}或1",
    "{}减1", "{}的倒数", "可能是{}", "{}不对", "除了{}", "小于{}", "没有{}", "{}的一半", "-{}", "{}万元",
    "百分之负{}", "{}次方", "根号{}",
    "损失{}元", "最多{}", "如果x=1，{}", "{}错误", "非{}", "接近{}", "{}的立方", "{}的相反数", "减少{}", "{}亿元",
]  # fmt: skip


def in_chinese(number: int) -> str:
    """An integer below ten thousand in Chinese."""
    text = ""
    for scale, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = number // scale % 10
        if digit:
            text += _HAN_DIGITS[digit] + name
        elif text and number % scale and not text.endswith("零"):
            text += "零"
    return text.removeprefix("一") if 10 <= number < 20 else text or "零"


def chinese_right(generator: random.Random) -> tuple[str, str]:
    """A number with a unit in a Chinese sentence; Chinese numerals, fractions and percentages."""
    number = generator.randint(2, 999)
    written = generator.choice([str(number), str(number), in_chinese(number), _digits(generator, str(number))])
    frame = generator.choice(_HAN_FRAMES)
    top, bottom = generator.randint(1, 8), generator.randint(9, 97)
    cases = [
        (written, str(number)),
        (written + generator.choice(_HAN_UNITS), str(number)),
        (written + generator.choice(_HAN_UNITS), str(number)),
        (f"{number}万", f"{number}0000"),
        (f"{in_chinese(number)}万", f"{number}0000"),
        (f"负{written}", str(-number)),
        (f"百分之{written}", f"{number}%"),
        (f"百分之{written}", str(number / 100)),
        (f"{bottom}分之{top}", rf"\frac{{{top}}}{{{bottom}}}"),
        (f"{in_chinese(bottom)}分之{in_chinese(top)}", f"{top}/{bottom}"),
        (rf"{number}\text{{{generator.choice(_HAN_UNITS)}}}", str(number)),
    ]
    answer, gold = generator.choice(cases)
    return frame.format(answer), gold


def chinese_wrong(generator: random.Random) -> tuple[str, str]:
    """A hedge, negation, multiplier or computation in Chinese; another number; another unit."""
    number = generator.randint(2, 999)
    frame = generator.choice(_HAN_FRAMES[:12])
    kind = generator.randrange(4)
    if kind < 2:
        return frame.format(generator.choice(_HAN_CHANGES).format(number)), str(number)
    if kind == 2:
        return frame.format(in_chinese(number + generator.randint(1, 9)) + generator.choice(_HAN_UNITS)), str(number)
    first, second = generator.sample(
        ["元", "米", "厘米", "千克", "小时", "分钟", "平方米", "美元", "度", "升", "克", "天"], 2
    )
    return frame.format(f"{number}{first}"), f"{number}{second}"


FAMILIES: dict[str, tuple[Rule, Rule]] = {
    "labels": (label_right, label_wrong),
    "nouns": (noun_right, noun_wrong),
    "number words": (number_word_right, number_word_wrong),
    "styles": (style_right, style_wrong),
    "unicode": (partial(_unicode_pair, change=0), partial(_unicode_pair, change=3)),
    "forms": (form_right, form_wrong),
    "no solution": (nothing_right, nothing_wrong),
    "chinese": (chinese_right, chinese_wrong),
}
"""Name -> the rules of its right and of its wrong answers."""
