"""Questions about characters: answers that the Unicode database gives, and held-out characters that training
never names.
"""

from __future__ import annotations

from collections import Counter

import pytest

from podtune.demo_data import unicode_characters
from podtune.demo_data.unicode_characters import Row, held_out


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
        ("GREEK SMALL LETTER ALPHA: which script has it?", "GREEK"),
        ("GREEK SMALL LETTER ALPHA: what is its capital form?", "GREEK CAPITAL LETTER ALPHA"),
        ("VULGAR FRACTION ONE HALF: what number is it?", "1 over 2"),
        ("EURO SIGN: what kind of character is it?", "a symbol"),
        (
            "LATIN SMALL LETTER E WITH ACUTE: what is it made of?",
            "LATIN SMALL LETTER E + COMBINING ACUTE ACCENT",
        ),
    ],
)
def test_the_answers_are_those_of_the_database(question: str, answer: str) -> None:
    answers = {row.question: row.answer for row in unicode_characters.every_question()}
    assert answers[question] == answer
    assert "KELVIN SIGN: what is its small form?" not in answers  # a K, which its name does not say
    assert "HIRAGANA LETTER GA: what is it made of?" not in answers  # KA with a mark
