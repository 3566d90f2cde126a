"""Questions about characters, from the Unicode database that is part of every Python (``unicodedata``).

A model can answer them about characters that it has never seen, because the answer follows from the words of
a character's name: which script it has, what kind of character it is, its other letter case, the number it
stands for, the characters it is made of.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction

DESCRIPTION = "Questions and answers about the characters of Unicode, from Python's unicodedata."
EVAL_SHARE = 10  # one group in ten is held out
LAST = 0x1FFFF  # the planes above hold ideographs, tags and private use
MOST_OF_A_KIND = 3_500

# Of the finer categories a name says nothing: which mark has a width, which symbol is mathematical.
_CATEGORIES = {
    "Lu": "a capital letter",
    "Ll": "a small letter",
    "Lm": "a modifier letter",
    "Lo": "a letter without case",
    "M": "a mark",
    "Nd": "a decimal digit",
    "N": "a number",
    "P": "a punctuation mark",
    "S": "a symbol",
    "Z": "a space",
}
# Scripts of hundreds and thousands of numbered or combined signs would drown the others.
_LARGE = re.compile(
    "CJK|HANGUL|YI |CUNEIFORM|TANGUT|BAMUM|ETHIOPIC|KHITAN|NUSHU|HENTAIGANA|VAI|SIGNWRITING|BRAILLE"
    "|EGYPTIAN|ANATOLIAN|LINEAR|MENDE|MIAO|CANADIAN|DUPLOYAN|CYPRO|VARIATION|BYZANTINE|MATHEMATICAL"
)
_CASE = re.compile(r"\b(?:CAPITAL|SMALL) ")
_SCRIPT = re.compile(r"(.+?) (?:CAPITAL|SMALL|LETTER|DIGIT|VOWEL|SYLLABLE)\b")


@dataclass(frozen=True)
class Row:
    """One row of a set. The columns are the fields in this order, without ``group``.

    Attributes:
        kind: the sort of question, such as ``script``.
        object: what the question is about.
        group: rows of one group are held out together.
    """

    question: str
    answer: str
    kind: str
    object: str
    group: str = field(kw_only=True, compare=False)


def order_of(*parts: object) -> int:
    """A number that depends on the parts alone, the same in every process."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "big")


def held_out(group: str, seed: int) -> bool:
    """True if the rows of a group stand in eval."""
    return order_of(seed, group) % EVAL_SHARE == 0


def questions(rows: int, seed: int) -> list[Row]:
    """Draw at most ``rows`` questions, and :data:`MOST_OF_A_KIND` of each kind, by hash."""
    drawn: list[Row] = []
    room: dict[str, int] = {}
    for row in sorted(every_question(), key=lambda row: order_of(seed, row.kind, row.object)):
        room[row.kind] = room.get(row.kind, MOST_OF_A_KIND) - 1
        if room[row.kind] >= 0 and len(drawn) < rows:
            drawn.append(row)
    # the frequent kinds came first: mixed, so that the first rows of eval stand for all
    return sorted(drawn, key=lambda row: order_of(seed, row.question))


def every_question() -> Iterator[Row]:
    """All questions that the database answers, in the order of code points."""
    for code in range(LAST + 1):
        character = chr(code)
        name = unicodedata.name(character, "")
        if name and not _LARGE.match(name):
            for kind, question, answer in _facts(character, name):
                yield Row(question, answer, kind, name, group=_group(character, name))


def _group(character: str, name: str) -> str:
    """The name that both cases of a letter share, so that they are held out together."""
    small = character.lower() if len(character.lower()) == 1 else character
    if len(small.upper()) == 1:  # a final sigma and a sigma have one capital
        small = small.upper().lower()
    return unicodedata.name(small, name) if len(small) == 1 else name


def _facts(character: str, name: str) -> Iterator[tuple[str, str, str]]:
    """(kind, question, answer) of one character.

    The name comes first, as in the answers that begin with it: behind a space a tokenizer has other tokens
    for the same word, and a small model would have to learn them as pairs.
    """
    code = unicodedata.category(character)
    if category := _CATEGORIES.get(code) or _CATEGORIES.get(code[0]):
        yield "category", f"{name}: what kind of character is it?", category
    if script := _SCRIPT.match(name):
        yield "script", f"{name}: which script has it?", script[1]
    for form, other in (("capital", character.upper()), ("small", character.lower())):
        other_name = unicodedata.name(other, "") if len(other) == 1 and other != character else ""
        # not KELVIN SIGN, whose small form is LATIN SMALL LETTER K: the answer must follow from the name
        if other_name and _CASE.sub("", other_name) == _CASE.sub("", name):
            yield "letter case", f"{name}: what is its {form} form?", other_name
    value = unicodedata.numeric(character, -1)
    if value >= 0:
        number = Fraction(value).limit_denominator(1000)
        # not 1/2: exact match looks past punctuation
        answer = str(number) if number.denominator == 1 else f"{number.numerator} over {number.denominator}"
        yield "number", f"{name}: what number is it?", answer
    parts = [unicodedata.name(part) for part in unicodedata.normalize("NFD", character)]
    # not HIRAGANA LETTER GA, which is KA with a mark: the answer must follow from the name here, too
    if len(parts) > 1 and name.startswith(parts[0]):
        yield "made of", f"{name}: what is it made of?", " + ".join(parts)
