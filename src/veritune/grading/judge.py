"""The equivalence judge: whether an answer states what the gold answer states, and by which rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from typing import Any, NamedTuple

from veritune.grading.math.clock import same_clock, without_markup
from veritune.grading.math.exact import InexactError, TooLargeError, exact_value
from veritune.grading.math.expressions import real_value, variable_names
from veritune.grading.math.intervals import Region, equal_regions, intersection_of, region
from veritune.grading.math.labels import renamed
from veritune.grading.math.limits import MAX_CHARACTERS
from veritune.grading.math.literals import read_number
from veritune.grading.math.nodes import Node, letter
from veritune.grading.math.reading import Reading, read
from veritune.grading.math.structures import (
    equal_trees,
    has_sign_choice,
    has_unevaluated_operation,
    is_plain_number,
    is_unreduced_fraction,
    match_unordered,
    sign_choices,
)
from veritune.grading.math.surface import clean
from veritune.grading.math.units import PERCENT, Unit, same_unit
from veritune.grading.rules import DEFAULT_POLICY, GradingPolicy


class Verdict(NamedTuple):
    """Whether the answer is right, and the rule that decided."""

    equal: bool
    rule: str


_PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]{1,3}(?:,[0-9]{3})++|[0-9]{1,400})(?:\.[0-9]{0,400})?|[+-]?\.[0-9]{1,400}")
_MAX_CHOICE_CHARACTERS = 24
_MAX_FORMS = 4
_CHOICE_GOLD = re.compile(r"\(?([A-Ja-dfghj])\)?\.?")
_CHOICE = re.compile(
    r"(?:i (?:would )?(?:choose|pick|select) )?"
    r"(?:(?:the |my )?(?:final |correct |best )?(?:answer|option|choice)(?: is)?:?\s*(?:option|choice)?\s*)?"
    r"[(\[]?\s*([A-Ja-j])\s*(?:[)\].:]+\s*(.*))?",
    re.DOTALL | re.IGNORECASE,
)
_SEVERAL_CHOICES = re.compile(r"\b(?:and|or|not)\b|(?:^|[\s(,])[A-J](?:[).,:]|$)")


def is_equivalent(answer: object, gold: object, policy: GradingPolicy = DEFAULT_POLICY) -> bool:
    """Whether `answer` states what `gold` states.

    `gold` is a string, an int, a float (taken exactly as Python prints it), or a list or tuple of which any may match.
    Never raises and never runs what it reads; takes linear time but for lists of at most 64 items.
    """
    return judge(answer, gold, policy).equal


def judge(answer: object, gold: object, policy: GradingPolicy = DEFAULT_POLICY) -> Verdict:
    """The verdict of `is_equivalent` with the name of the rule that gave it."""
    if isinstance(gold, (list, tuple, set, frozenset)):
        return _judge_any(answer, list(gold), policy)
    answer_text, gold_text = as_text(answer), as_text(gold)
    if len(answer_text) > MAX_CHARACTERS or len(gold_text) > MAX_CHARACTERS:
        return Verdict(answer_text.strip() == gold_text.strip(), "too long")
    try:
        plain_answer, plain_gold = clean(answer_text), clean(gold_text)
        return _quick_verdict(plain_answer, plain_gold) or _judge_plain(plain_answer, plain_gold, policy)
    except Exception as error:  # no answer may end a run: a fault of the judge refuses it, and its rule says so
        return Verdict(False, f"failed: {type(error).__name__}")


def _judge_any(answer: object, golds: Sequence[object], policy: GradingPolicy) -> Verdict:
    verdict = Verdict(False, "no gold answer")
    for gold in golds:
        verdict = judge(answer, gold, policy)
        if verdict.equal:
            break
    return verdict


def as_text(value: object) -> str:
    """A gold answer or an answer as a string; 1e16 becomes its digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    try:
        return "" if value is None else str(value)
    except ValueError:  # an integer of more digits than Python prints
        return ""


def _quick_verdict(answer: str, gold: str) -> Verdict | None:
    """What the normaliser alone settles: empty and identical texts, and plain numbers. None for the rest."""
    if not answer or not gold:
        return Verdict(False, "empty")
    if answer == gold:
        return Verdict(True, "identical")
    if _PLAIN_NUMBER.fullmatch(gold) and _PLAIN_NUMBER.fullmatch(answer):
        return Verdict(_plain_value(answer) == _plain_value(gold), "number")
    return None


def _plain_value(text: str) -> Fraction | int:
    value = read_number(text.lstrip("+-").replace(",", ""))
    return -value if text.startswith("-") else value


def _judge_plain(answer: str, gold: str, policy: GradingPolicy) -> Verdict:
    if policy.multiple_choice and len(gold) < _MAX_CHOICE_CHARACTERS:
        letter = _CHOICE_GOLD.fullmatch(without_markup(gold))
        if letter:
            chosen = _chosen_letter(without_markup(answer))
            if chosen is not None:
                return Verdict(chosen == letter[1].upper(), "choice")
    gold_reading = read(gold, sentences=policy.sentences)
    return compare(read(answer, sentences=policy.sentences), gold_reading, policy)


def _chosen_letter(text: str) -> str | None:
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    rest = match[2] or ""
    if len(rest) > 120 or rest[:1] in tuple(",;/&|+") or _SEVERAL_CHOICES.search(rest):
        return ""
    return match[1].upper()


def compare(answer: Reading, gold: Reading, policy: GradingPolicy) -> Verdict:
    """Whether two readings state the same."""
    if answer.kind == "value" and gold.kind == "value":
        return _compare_values(answer, gold, policy)
    if answer.kind == gold.kind and answer.kind != "list":
        return _SAME_KIND[answer.kind](answer, gold)
    if "list" in (answer.kind, gold.kind):
        return _compare_lists(answer, gold, policy)
    kinds = {answer.kind, gold.kind}
    if kinds == {"clock", "ratio"}:
        return _compare_clock_and_ratio(answer, gold)
    if kinds == {"ratio", "value"}:
        return _compare_ratio_and_value(answer, gold)
    return Verdict(False, f"{answer.kind} is no {gold.kind}")


_SAME_KIND: dict[str, Any] = {
    "words": lambda answer, gold: Verdict(bool(gold.words) and answer.words == gold.words, "words"),
    "clock": lambda answer, gold: Verdict(same_clock(answer.special, gold.special), "clock"),
    "date": lambda answer, gold: Verdict(answer.special == gold.special, "date"),
    "numeral": lambda answer, gold: Verdict(answer.special == gold.special, "numeral with base"),
    "ratio": lambda answer, gold: Verdict(_ratio_values(answer) == _ratio_values(gold), "ratio"),
}


def _ratio_values(reading: Reading) -> list[Fraction]:
    """The terms divided by the first, so that 6:4 is 3:2."""
    terms = [Fraction(term.replace(" ", "")) for term in reading.special]
    return [term / terms[0] for term in terms] if terms[0] else terms


def _compare_clock_and_ratio(answer: Reading, gold: Reading) -> Verdict:
    """`7:11`, which may be a time, as a ratio has these terms alone: it is `7 to 11`."""
    clock, ratio = (answer, gold) if answer.kind == "clock" else (gold, answer)
    return Verdict(clock.label == ":".join(ratio.special).replace(" ", ""), "ratio")


def _compare_ratio_and_value(answer: Reading, gold: Reading) -> Verdict:
    ratio, value = (answer, gold) if answer.kind == "ratio" else (gold, answer)
    terms = [Fraction(term.replace(" ", "")) for term in ratio.special]
    node = value.node
    if len(terms) != 2 or terms[1] == 0 or node is None or node.kind != "div":
        return Verdict(False, "ratio")
    try:
        return Verdict(terms[0] / terms[1] == exact_value(node), "ratio")
    except (InexactError, TooLargeError, ZeroDivisionError):
        return Verdict(False, "ratio")


def _compare_values(answer: Reading, gold: Reading, policy: GradingPolicy) -> Verdict:
    answer, gold = _with_attached_unit(answer, gold), _with_attached_unit(gold, answer)
    assert answer.node is not None and gold.node is not None
    if not _same_label(answer, gold):
        return Verdict(False, "another variable")
    if answer.approximate and not (gold.decimal or gold.approximate):
        return Verdict(False, "approximation")
    percent = _compare_percent(answer, gold, policy)
    if percent is not None:
        return percent
    if not same_unit(answer.unit, gold.unit, policy.ignore_missing_units):
        return Verdict(False, "unit")
    if is_plain_number(gold.node):
        if not policy.unevaluated_expressions and has_unevaluated_operation(answer.node):
            return Verdict(False, "unevaluated")
        if not policy.unreduced_fractions and is_unreduced_fraction(answer.node):
            return Verdict(False, "unreduced")
    answer_node, gold_node = _as_equation(answer, gold), _as_equation(gold, answer)
    if len(answer.function) == len(gold.function) and answer.function != gold.function:
        answer_node, gold_node = renamed(answer_node, answer.function), renamed(gold_node, gold.function)
    if has_sign_choice(answer_node) or has_sign_choice(gold_node):
        same = match_unordered(_members(answer_node), _members(gold_node), equal_trees)
        same = same or _equal_conditions(_excluded(answer), _excluded(gold))
        return Verdict(same, "plus or minus")
    return Verdict(equal_trees(answer_node, gold_node), "value")


def _with_attached_unit(reading: Reading, other: Reading) -> Reading:
    """`100g` as 100 grams where the other side is in grams; elsewhere it is a product."""
    node = reading.node
    if not other.unit or reading.unit or node is None or node.kind != "juxtapose" or len(node.children) != 2:
        return reading
    value, symbol = node.children
    unit = Unit(frozenset({(str(symbol.value), 1)}))
    return replace(reading, node=value, unit=unit) if is_plain_number(value) and unit == other.unit else reading


def _as_equation(reading: Reading, other: Reading) -> Node:
    """`y = 2x + 1`, read as the value 2x + 1 of y, as an equation where the other side is one."""
    assert reading.node is not None and other.node is not None
    if other.node.kind == "relation" and reading.label not in ("", "?") and variable_names(reading.node):
        return Node("relation", (letter(reading.label), reading.node), ("=",))
    return reading.node


def _excluded(reading: Reading) -> Reading:
    r"""`x \ne \pm 3` as two conditions."""
    node = reading.node
    if node is None or node.kind != "relation" or node.value != ("!=",):
        return reading
    return Reading("list", items=tuple(Reading("value", node=choice) for choice in sign_choices(node)))


def _members(node: Node) -> list[Node]:
    """Both values of a ±, also within a set; the members of other sets."""
    return [choice for child in (node.children if node.kind == "set" else (node,)) for choice in sign_choices(child)]


def _same_label(answer: Reading, gold: Reading) -> bool:
    if len(answer.function) == len(gold.function) > 0:
        return answer.function[0].lower() == gold.function[0].lower()
    if "" in (answer.label, gold.label) or "?" in (answer.label, gold.label):
        return True
    return answer.label.lower() == gold.label.lower()


def _compare_percent(answer: Reading, gold: Reading, policy: GradingPolicy) -> Verdict | None:
    """`50%` against a number without a unit; None where the percent sign may only be missing, or is no question."""
    if (answer.unit == PERCENT) == (gold.unit == PERCENT) or not policy.percent_is_hundredths:
        return None
    if answer.unit and gold.unit:
        return None
    assert answer.node is not None and gold.node is not None
    percent, other = (answer.node, gold.node) if answer.unit == PERCENT else (gold.node, answer.node)
    bare = real_value(other)
    if bare is None or real_value(percent) is None:
        return None
    if not policy.unevaluated_expressions and is_plain_number(gold.node) and has_unevaluated_operation(answer.node):
        return Verdict(False, "unevaluated")
    if equal_trees(Node("percent", (percent,)), other):
        return Verdict(True, "percent")
    # `0.5%` is a hundredth of the proportion 0.5, while the number 50 may count percent.
    return Verdict(False, "percent") if 0 < abs(bare) < 1 else None


def _compare_lists(answer: Reading, gold: Reading, policy: GradingPolicy) -> Verdict:
    answers, golds = _items(answer), _items(gold)
    if _has_sign_choice(answer) or _has_sign_choice(gold):
        policy = replace(policy, unevaluated_expressions=True)  # `-3 ± 1` states -2 and -4
    assignment = _compare_assignment(answer, gold, policy) or _compare_assignment(gold, answer, policy)
    if assignment is not None:
        return assignment
    if answers is None or golds is None:
        equal = _equal_conditions(answer, gold) or (golds is None and _says_one_value(answer, gold, policy))
        return Verdict(equal, "conditions" if equal else f"{answer.kind} is no {gold.kind}")
    labels = [item.label for item in golds]
    if len(set(labels)) == len(labels) > 1 and not any(item.label for item in answers):
        in_order = len(answers) == len(golds) and all(
            compare(a, g, policy).equal for a, g in zip(answers, golds, strict=True)
        )
        return Verdict(in_order, "list in order")
    opposite = _contradict(answer.connective, gold.connective, golds)
    if not opposite and match_unordered(answers, golds, lambda a, g: compare(a, g, policy).equal):
        return Verdict(True, "list")
    return Verdict(_equal_conditions(answer, gold), "list")


def _says_one_value(answer: Reading, gold: Reading, policy: GradingPolicy) -> bool:
    """`1/2 or 0.5` gives one value in two forms, whereas `5 m or 5 cm` gives two that 5 alone would match."""
    items = answer.items
    if answer.connective != "or" or len(items) > _MAX_FORMS or not all(item.node for item in items):
        return False
    pairs = [(item, gold) for item in items] + list(combinations(items, 2))
    return all(compare(one, other, policy).equal for one, other in pairs)


def _contradict(first: str, second: str, items: Sequence[Reading]) -> bool:
    """Whether `and` on one side and `or` on the other differ: not for roots, but for conditions, words and letters."""
    connectives = {first, second}
    if connectives == {"and", "or"} and any(
        item.node is not None and item.node.kind == "relation" and item.node.value[0] != "=" for item in items
    ):
        return True
    named = all(item.kind == "words" or (item.node is not None and item.node.kind == "variable") for item in items)
    return named and len(connectives) == 2 and "or" in connectives


def _compare_assignment(assigned: Reading, point: Reading, policy: GradingPolicy) -> Verdict | None:
    """`x = 1, y = 2` against (1, 2): the variables in the order of the alphabet; None where this is no such case."""
    node = point.node
    if node is None or node.kind != "tuple" or node.value != "()" or len(assigned.items) != len(node.children):
        return None
    if len({item.label for item in assigned.items} - {"", "?"}) != len(assigned.items):
        return None
    values = [replace(item, label="") for item in sorted(assigned.items, key=lambda item: item.label)]
    coordinates = [Reading("value", node=child, decimal=point.decimal) for child in node.children]
    same = all(compare(value, other, policy).equal for value, other in zip(values, coordinates, strict=True))
    return Verdict(same, "assignment")


def _has_sign_choice(reading: Reading) -> bool:
    nodes = [reading.node, *(item.node for item in reading.items)]
    return any(node is not None and has_sign_choice(node) for node in nodes)


def _items(reading: Reading) -> list[Reading] | None:
    """The members of a list, of a set, or of both signs of a ±; None for a single value."""
    if reading.kind == "list":
        result: list[Reading] = []
        for item in reading.items:
            choices = sign_choices(item.node) if item.node is not None else []
            if len(choices) > 1:
                result += [Reading("value", node=choice, unit=item.unit, label=item.label) for choice in choices]
            else:
                result.append(item)
        return result
    if reading.node is None:
        return None
    members = reading.node.children[1] if reading.node.kind == "member" else reading.node
    if members.kind == "set":
        choices = [choice for child in members.children for choice in sign_choices(child)]
        return [Reading("value", node=choice, unit=reading.unit) for choice in choices]
    choices = sign_choices(reading.node)
    if len(choices) > 1:
        return [Reading("value", node=choice, unit=reading.unit, label=reading.label) for choice in choices]
    return None


def _equal_conditions(answer: Reading, gold: Reading) -> bool:
    """`x < 1 or x > 2` against a union of intervals."""
    names = _condition_names(answer), _condition_names(gold)
    if max(map(len, names)) > 1 or (all(names) and names[0] != names[1]):
        return False
    left, right = _region_of(answer), _region_of(gold)
    return left is not None and right is not None and equal_regions(left, right)


def _condition_names(reading: Reading) -> set[str]:
    nodes = (reading.node, *(item.node for item in reading.items))
    return {name.lower() for node in nodes if node is not None for name in variable_names(node)}


def _region_of(reading: Reading) -> Region | None:
    if reading.kind == "value" and reading.node is not None:
        return region(reading.node)
    nodes = tuple(item.node for item in reading.items if item.node is not None)
    if len(nodes) != len(reading.items) or any(
        node.kind not in ("relation", "member", "tuple", "union") for node in nodes
    ):
        return None
    if reading.connective == "or":
        return region(Node("union", nodes, "or"))
    if all(node.kind == "relation" for node in nodes):
        return intersection_of(nodes, alternatives=reading.connective == ",")
    return None
