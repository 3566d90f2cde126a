"""Wishes and the podtune commands for them: commands that exist, and names in eval that train lacks."""

from __future__ import annotations

import re
import shlex

import click
import pytest
import typer

from podtune.cli import app
from podtune.qa import podtune_commands
from podtune.qa.row import held_out

NAME = re.compile(r"\b[a-z]+-[a-z]+\b")


@pytest.mark.parametrize("command", podtune_commands._WISHES)
def test_every_command_is_taken_by_the_command_line(command: str) -> None:
    words = shlex.split(command.format(a="red-fox", b="old-owl", n=3))[1:]
    parsed: click.Command = typer.main.get_command(app)
    context = click.Context(parsed)
    while isinstance(parsed, click.Group):
        parsed_next = parsed.get_command(context, words.pop(0))
        assert parsed_next is not None
        parsed = parsed_next
    parsed.make_context(command, words, resilient_parsing=False)


def test_names_of_held_out_wishes_are_never_trained() -> None:
    rows = podtune_commands.questions(4000, seed=0)
    made_up = {
        f"{first}-{second}"
        for first in podtune_commands._FIRST.split()
        for second in podtune_commands._SECOND.split()
    }
    names = {
        side: {name for row in rows if held_out(row.group, 0) is side for name in NAME.findall(row.question)}
        & made_up
        for side in (True, False)
    }
    assert len(names[True]) > 100
    assert not names[True] & names[False]


def test_a_wish_has_one_command() -> None:
    rows = podtune_commands.questions(4000, seed=0)
    assert len({row.question for row in rows}) == len(rows) > 3500
    assert all(row.answer.startswith("podtune ") and "{" not in row.answer + row.question for row in rows)
