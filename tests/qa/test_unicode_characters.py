"""Questions about characters: answers that the Unicode database gives, and held-out characters that training
never names.
"""

from __future__ import annotations

from collections import Counter

import pytest

from podtune.qa import unicode_characters
from podtune.qa.row import Row, held_out


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return unicode_characters.questions(12_000, seed=0)


def test_every_sort_of_question_is_asked_often_and_none_drowns_the_others(rows: list[Row]) -> None:
    kinds = Counter(row.kind for row in rows)
    assert set(kinds) == {"category", "script", "letter case", "number", "made of"}
    assert min(kinds.values()) > 800
    assert max(kinds.values()) <= unicode_characters.MOST_OF_A_KIND


def test_no_question_is_asked_twice_and_the_draw_is_the_same_every_time(rows: list[Row]) -> None:
    assert len({row.question for row in rows}) == len(rows)
    assert unicode_characters.questions(12_000, seed=0) == rows
    assert unicode_characters.questions(100, seed=1) != rows[:100]


def test_a_held_out_character_is_never_asked_about_in_train_nor_is_its_other_letter_case(
    rows: list[Row],
) -> None:
    unseen = {row.object for row in rows if held_out(row.group, 0)}
    trained = [row for row in rows if not held_out(row.group, 0)]
    assert 0.05 < len(unseen) / len({row.object for row in rows}) < 0.15
    assert not unseen & {row.object for row in trained}
    assert not unseen & {row.answer for row in trained if row.kind == "letter case"}


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Which script has GREEK SMALL LETTER ALPHA?", "GREEK"),
        ("What is the capital form of GREEK SMALL LETTER ALPHA?", "GREEK CAPITAL LETTER ALPHA"),
        ("What number is VULGAR FRACTION ONE HALF?", "1 over 2"),
        ("What kind of character is EURO SIGN?", "a symbol"),
        ("What is LATIN SMALL LETTER E WITH ACUTE made of?", "LATIN SMALL LETTER E + COMBINING ACUTE ACCENT"),
    ],
)
def test_the_answers_are_those_of_the_database(question: str, answer: str) -> None:
    answers = {row.question: row.answer for row in unicode_characters.every_question()}
    assert answers[question] == answer
    assert "What is the small form of KELVIN SIGN?" not in answers
