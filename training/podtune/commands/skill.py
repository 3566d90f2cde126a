"""podtune skill: how an agent uses podtune."""

from __future__ import annotations

from pathlib import Path

TEXT = Path(__file__).with_name("SKILL.md")


def skill() -> None:
    """Print how an agent goes from a question to a checked submission with podtune's own commands.

    \b
    Examples:
      podtune skill > .agents/skills/podtune/SKILL.md
    """
    print(TEXT.read_text(encoding="utf-8"), end="")
