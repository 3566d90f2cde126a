"""A shell that completes podtune's commands knows the values of options too."""

from __future__ import annotations

import pytest
import typer
from click.shell_completion import ShellComplete

from podtune.cli import app


@pytest.mark.parametrize(
    ("words", "typed", "offered"),
    [
        (["render", "-f"], "two", {"two-node", "two-node-full"}),
        (["bench", "plan", "--hardware"], "H100", {"H100", "H100-NVL", "H100-PCIe"}),
        (["bench", "plan", "--strategy"], "zero", {"zero2", "zero3", "zero3-offload"}),
        (["bench", "run", "--preset"], "smo", {"smoke"}),
    ],
)
def test_a_shell_completes_values(words: list[str], typed: str, offered: set[str]) -> None:
    found = ShellComplete(typer.main.get_command(app), {}, "podtune", "_X").get_completions(words, typed)
    assert {item.value for item in found} == offered
