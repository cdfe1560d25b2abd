"""The signs and commands that the parser gives a meaning: relations, brackets, constants, environments."""

from __future__ import annotations

from veritune.grading.math.nodes import Node, constant, number
from veritune.grading.math.vocabulary import words

RELATIONS = {
    "=": "=",
    "==": "=",
    "<": "<",
    ">": ">",
    "<=": "<=",
    ">=": ">=",
    "le": "<=",
    "ge": ">=",
    "ne": "!=",
    "!=": "!=",
}
SET_OPERATIONS = {"cup": "union", "cap": "intersection", "setminus": "difference"}
CONNECTIVES = {"or": "union", "lor": "union", "and": "intersection", "land": "intersection"}
CLOSERS = {"(": ")]", "[": ")]", "{": "}", "langle": ("rangle",), "lfloor": ("rfloor",), "lceil": ("rceil",)}
MATRICES = words("matrix pmatrix bmatrix Bmatrix array smallmatrix vmatrix")
CONSTANT_COMMANDS = {"pi": constant("pi"), "infty": constant("infinity"), "varnothing": Node("set", ())}
TWO_ARGUMENTS = {"frac": "div", "binom": "binomial"}
DECORATIONS = words("overline vec hat widehat angle triangle")
BASES_OF_LOG = {"ln": constant("e"), "lg": number(10)}
NOT_FACTORS = words(
    "pm mp over choose cup cap setminus in end } rangle rfloor rceil \\ circ approx to rightarrow Rightarrow implies "
    "iff equiv pmod bmod mod & , ; quad notin subset land lor and or"
)
