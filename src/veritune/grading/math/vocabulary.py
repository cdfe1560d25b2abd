"""The words that the grader knows: functions, letters, numbers, units, and the words that keep a sentence from
stating a value.
"""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The set of the white-space separated words of `text`."""
    return frozenset(text.split())


FUNCTIONS = words(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp sqrt cbrt gcd lcm max min det floor ceil"
)
"""Functions that are read by name, with or without a backslash."""

GREEK_LETTERS = words(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)

CONSTANT_WORDS = words("pi infinity inf oo infty")

NAMES = FUNCTIONS | GREEK_LETTERS | CONSTANT_WORDS
"""Runs of letters that mathematics reads as one name."""

LETTER_WORDS = words(
    "am an as at be by do go he hi if in is it me my no of oh ok on or so to up us we and not odd yes red add ace any "
    "all for how low now own act arc bet dot ego fly mm cm km kg mg ml mi ft yd lb oz hr pm sq cu cc mph kph rpm sec "
    "min rad pts bps ppm ppb "
    "per sum god dog cat bit men two six ten one the set one new log"
)
"""Short words that are no product of variables."""

PRODUCT_WORDS = words("at an am as by be my")
"""Those of them that are a product within a sum: `at + b`."""

_SMALL_NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
NUMBER_WORDS = {word: value for value, word in enumerate(_SMALL_NUMBERS.split())} | {
    word: 10 * tens for tens, word in enumerate(_TENS.split(), start=2)
}
SCALE_WORDS = {
    name: scale
    for names, scale in {
        "tens": 10,
        "dozen dozens doz": 12,
        "score scores": 20,
        "hundred hundreds": 10**2,
        "gross": 144,
        "thousand thousands": 10**3,
        "myriad myriads": 10**4,
        "lakh lakhs lac lacs": 10**5,
        "million millions": 10**6,
        "crore crores": 10**7,
        "billion billions": 10**9,
        "trillion trillions": 10**12,
        "quadrillion quadrillions": 10**15,
    }.items()
    for name in names.split()
}
"""Numbers that multiply the number before them."""

FRACTION_WORDS = {
    name: value
    for value, stem in {
        3: "third",
        4: "fourth",
        5: "fifth",
        6: "sixth",
        7: "seventh",
        8: "eighth",
        9: "ninth",
        10: "tenth",
        11: "eleventh",
        12: "twelfth",
        **{NUMBER_WORDS[stem]: stem + "th" for stem in _SMALL_NUMBERS.split()[13:]},
        **{NUMBER_WORDS[stem]: stem[:-1] + "ieth" for stem in _TENS.split()},
        100: "hundredth",
        1000: "thousandth",
        10**6: "millionth",
        10**9: "billionth",
    }.items()
    for name in (stem, stem + "s")
} | {"half": 2, "halves": 2, "quarter": 4, "quarters": 4}

PARTS = {
    name: parts
    for names, parts in {
        "permille permill permil promille": 1_000,
        "bps basispoint basispoints": 10_000,
        "ppm": 10**6,
        "ppb": 10**9,
    }.items()
    for name in names.split()
}
"""Words after a number that divide it, as percent does; written as one word or as two."""

MONTHS = {
    name: position
    for position, names in enumerate(
        [
            "january jan",
            "february feb",
            "march mar",
            "april apr",
            "may",
            "june jun",
            "july jul",
            "august aug",
            "september sep sept",
            "october oct",
            "november nov",
            "december dec",
        ],
        start=1,
    )
    for name in names.split()
}

COPULAS = words(
    "yields yield "
    "is are was were be equals equal = : has have had gives get gets got obtain obtained find found conclude "
    "costs cost totals makes made make sold sells sell earns earned earn needs needed need spends spent spend "
    "pays paid pay bought buys buy ate eats eat ran runs drove drives saved saves save collected collects took "
    "takes take receives received read reads reached wrote weighs weighed measures travels traveled walked walks "
    "uses used leaves left remain remains becomes became total scored scores hiked biked swam delivered delivers "
    "produced produces picked picks planted plants baked bakes cooked washed watched won wins gave gathered "
    "caught catches finished completed donated counted owns owned holds held grew worked works charges charged "
    "owes owed lasts lasted requires required kept keeps brought carried carries invested"
)
"""Words right after which a sentence states its value."""

FILLERS = words(
    "exactly just simply clearly thus therefore so hence then overall altogether together combined finally "
    "equal a an the total of only now also given by value "
    "precisely number him her them me us you he she it they each"
)
"""Words between the copula and the value, or around a value, that change nothing."""

RESULT_VERBS = words("equal equals amounts amount comes simplifies reduces evaluates sums adds leads")
"""Verbs after which `to` brings the value."""

QUANTITY_NOUNS = words(
    "profit total distance area length width height depth volume value cost price amount weight mass speed rate "
    "income revenue average mean score probability perimeter radius diameter time age number count bill fee tip tax "
    "balance gain surplus salary wage wages earnings savings rent budget payment temperature slope circumference "
    "capacity size grade measure median mode duration"
)
"""Nouns before `of` that leave the number what it is: `a profit of 70`, unlike `the square of 70`."""

PRONOUNS = words("he she it they we i you there")
QUESTION_WORDS = words("what which who why how is are does do did can could")
"""Words that make a question of the sentence that they begin."""

DETERMINERS = words("the this that these those a an each every her his its their our my your")
PREPOSITIONS = words(
    "of to from by on in at than with until per into like as and or for over under off out into onto "
    "day page question step chapter problem room section exercise figure case part line equation example"
)
"""Words right before a number that keep it from being what the sentence states."""

PHRASES = {
    "all real numbers": r"\mathbb{R}",
    "all reals": r"\mathbb{R}",
    "real numbers": r"\mathbb{R}",
    "empty set": r"\varnothing",
    "half": "1/2",
    "infinity": r"\infty",
    "noon": "12:00 pm",
    "midnight": "12:00 am",
} | dict.fromkeys(
    [
        "no solution",
        "no solutions",
        "no real solution",
        "no real solutions",
        "no solution exists",
        "no solutions exist",
        "no real solutions exist",
        "no real roots",
        "null set",
    ],
    r"\varnothing",
)
"""Whole answers in words that have a form in signs."""

SUBJECT_NOUNS = words(
    "minimum maximum remainder divisor difference product quotient range factor multiple limit root power exponent "
    "digit digits expected imaginary reduced floor ceiling increased first initial between third fourth fifth"
)
"""Blockers that only name what a sentence is about where they stand before `is`: `The remainder is 3`."""

COUNTED_NOUNS = words("options choices candidates multiples factors powers digits products limits ranges divisors")
"""Blockers that are things to count right after a number: `12 divisors`."""

ANSWER_NOUNS = words("answer answers ans result solution solutions value total sum")

NO_UNITS = (
    FUNCTIONS
    | (SCALE_WORDS | FRACTION_WORDS | PARTS).keys() - {"quarter", "quarters"}
    | words(
        """
        logarithm logarithms sine cosine tangent cotangent secant cosecant exponent exponents exponential exponentiated
        factorials conjugate conjugated transpose transposed derivative integral antiderivative differentiated
        integrated modulus residue negation negated negating additive complementary doubling tripling halving squaring
        cubing inverting subtracting quadruple quadrupled quintuple quintupled sextuple sextupled thrice signed
        backward backwards reverse reversed reversal flipped mirrored mirror rotated inverted swapped upside anagram
        repeating recurring repeated concatenated duplicated encoded scrambled shuffled permuted prime conj base radix
        binary ternary quaternary octal hex hexadecimal roman basis excluded exclude excludes exclusion excepted
        excepting omitted omitting removed removing deleted subtracted deducted eliminated void voided cancelled
        canceled annulled nullified null nil nought naught zilch nada refuted denied disproved disproven contradicted
        withdrawn retracted undone disqualified misprint misprinted typo disallowed forbidden prohibited banned barred
        barring sans lacking nope nay otherwise else contrary anything unlike absent debt debts indebted debit debits
        overdrawn overdraft arrears deficit deficits loss losses owed owing liability liabilities shortfall shortage
        underwater underground beneath subzero downward downwards decrease decreased reduction drop decline declined
        deduction deductions fold folded baker bakers nearest mega giga tera peta milli micro nano pico deci centi deca
        hecto mille tausend hundert millones milliard milliards milliarden mio mrd mn tn bil tril wan arab googol
        googolplex onward onwards upward upwards afterwards orders magnitude nonexistent
        """
    )
)
"""Words that never name what a number counts: functions, operations, other notations, negations, debts, numbers."""

NO_LAST_UNITS = words("short down behind off out back gone lost missing odd ago under shy")
"""Words that name nothing at the end of what stands after a number: `5 short`."""

NOUNS_IN_LY = words("family lily jelly butterfly daily weekly monthly yearly hourly quarterly nightly bully belly")
"""Words in -ly that are no adverbs of manner."""

UNIT_ADJECTIVES = words("nautical light")
"""Words before a unit that make another one of it: `nautical miles`, `light years`."""

BLOCKERS = words(
    """
    not no never none neither nor nobody nothing isn't aren't wasn't cannot can't isnt arent wasnt cant incorrect wrong
    false untrue impossible invalid except excluding besides without other another different instead
    maybe perhaps possibly probably likely unlikely presumably apparently seems seem appears appear guess guessing think
    believe suppose assume assuming assumed supposing suspect could might may would should unsure uncertain unclear
    unknown sure confident hopefully either whether
    about around approximately approx roughly nearly almost close near circa estimated estimate estimates approximate
    least most more less fewer greater larger smaller bigger higher lower above below under over up beyond exceed
    exceeds exceeding between within bound bounded limit upper until till through range ranging minimum maximum max
    if unless when whenever where while provided condition conditional depending depends for except once
    some any several many few such like example e.g. say among including candidates candidate
    options choices all both
    plus minus times divided multiplied multiply add added subtract subtracted difference product quotient squared
    cubed root power raised factorial choose mod modulo negative twice double doubled triple tripled half halves
    third thirds multiple multiples factor factors divisible divides divisor remainder
    pi sqrt ish something than but however though although
    first initially before after originally starts started begins began versus vs against than
    infinity infinite dividing adding multiplying tends approaches converges diverges goes increases decreases
    grand mil bn
    let undefined rounded truncated etc wait actually ignore ballpark digit digits reciprocal inverse
    opposite complement logarithm ends iff dne too following next previous preceding successor predecessor
    halved quartered lessened tops long
    usually sometimes often typically generally occasionally theoretically potentially supposedly allegedly tentatively
    conditionally hypothetically arguably predicted predicts predict guessed guesses expected expects hoped claims
    claimed lied wished wanted imaginary speculative tentative unverified unconfirmed pending rejected discarded
    incorrectly mistaken bogus fake increased reduced lowered negated inverted trebled floored ceiling floor cap
    backwards backward reversed negation excluded excepted omitted refuted
    """
) | (SCALE_WORDS.keys() - {"score", "scores", "gross"})
"""Words that make a number part of a bound, a hedge, a condition, a negation or a further computation."""

UNIT_SYNONYMS = {
    name: symbol
    for symbol, names in {
        "mm": "mm millimeter millimeters millimetre millimetres",
        "cm": "cm cms centimeter centimeters centimetre centimetres",
        "dm": "dm decimeter decimeters",
        "m": "m meter meters metre metres",
        "km": "km kms kilometer kilometers kilometre kilometres",
        "inch": "inch inches",
        "ft": "ft foot feet",
        "yd": "yd yds yard yards",
        "mile": "mi mile miles",
        "mg": "mg milligram milligrams",
        "g": "g gram grams",
        "kg": "kg kgs kilogram kilograms kilo kilos",
        "lb": "lb lbs pound pounds",
        "oz": "oz ounce ounces",
        "ton": "ton tons tonne tonnes",
        "ml": "ml mL milliliter milliliters millilitre millilitres",
        "L": "L liter liters litre litres",
        "gallon": "gal gallon gallons",
        "quart": "quart quarts",
        "pint": "pint pints",
        "cup": "cup cups",
        "s": "s sec secs second seconds",
        "min": "min mins minute minutes",
        "h": "h hr hrs hour hours",
        "day": "day days",
        "week": "week weeks wk wks",
        "month": "month months",
        "year": "year years yr yrs",
        "dollar": "dollar dollars usd buck bucks $",
        "cent": "cent cents ¢",
        "euro": "euro euros eur €",
        "pound sterling": "gbp £",
        "yen": "yen jpy ¥",
        "rupee": "rupee rupees rs inr ₹",
        "degree": "degree degrees deg °",
        "radian": "radian radians rad rads",
        "celsius": "celsius centigrade",
        "fahrenheit": "fahrenheit",
        "percent": "percent % pct",
        "N": "newton newtons",
        "J": "joule joules",
        "W": "watt watts",
        "kW": "kw kilowatt kilowatts",
        "Hz": "hz hertz",
        "V": "volt volts",
        "kWh": "kwh",
        "Pa": "Pa pascal pascals",
        "kPa": "kPa kilopascal kilopascals",
        "kJ": "kJ kilojoule kilojoules",
        "kHz": "khz kilohertz",
        "MHz": "mhz megahertz",
        "GHz": "ghz gigahertz",
        "A": "ampere amperes amp amps",
        "ohm": "ohm ohms",
        "mol": "mol mole moles",
        "calorie": "calorie calories",
        "kilocalorie": "kcal kilocalorie kilocalories",
        "acre": "acre acres",
        "hectare": "hectare hectares",
        "millisecond": "millisecond milliseconds",
        "decade": "decade decades",
        "century": "century centuries",
        "kelvin": "kelvin kelvins",
        "bit": "bits",
        "byte": "byte bytes",
        "MB": "MB megabyte megabytes",
        "GB": "GB gigabyte gigabytes",
        "teaspoon": "tsp teaspoon teaspoons",
        "tablespoon": "tbsp tablespoon tablespoons",
        "yuan": "yuan rmb cny renminbi",
        "won": "krw",
        "peso": "peso pesos",
        "franc": "franc francs chf",
    }.items()
    for name in names.split()
} | {"mph": "mph", "kph": "kph", "kmh": "kph", "kmph": "kph", "mpg": "mpg"}
"""Spelling -> symbol. Two answers with different symbols are different answers."""

POWERED_UNITS = frozenset({"mm", "cm", "dm", "m", "km", "inch", "ft", "yd", "mile", "s", "min", "h"})
"""Units that may be squared or cubed in words."""

RATES = {"mph": ("mile", "h"), "kph": ("km", "h"), "mpg": ("mile", "gallon")}
"""Abbreviations of one unit per another."""

UNIT_LETTERS = words("m g s h L V W J N K")
"""Single letters that are a unit when they stand apart after a number."""

UNIT_STOP_WORDS = words(
    "every in of the a an total altogether left remaining each all is are was were be answer final correct overall now "
    "per "
    "unit units exactly only her his their its our my he she they it we you him them that this these those there here "
    "by on at to from with and as been have has had did does do will away old long tall wide high deep"
)
"""Words after a number that say nothing of what is counted."""
