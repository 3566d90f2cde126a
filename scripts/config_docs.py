"""Fill the generated parts of docs/*.md from the code; a test holds them equal.

    python scripts/config_docs.py            # after a change of an argument, an error message or a right

A generated part stands between `<!-- generated: KIND WORDS -->` and `<!-- end -->`:
keys CLASS (arguments of a fine-tune), environment, renamed, benchmark, rights (the Role of docs/cluster.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from podtune.plan.shapes import Checkpointing

ROOT = Path(__file__).resolve().parent.parent
PART = re.compile(r"(<!-- generated: (\w+)((?: [\w/]+)*) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def filled(text: str) -> str:
    """A page with every generated part as the code has it today."""
    return PART.sub(lambda part: f"{part[1]}\n{KINDS[part[2]](part[3].split())}\n{part[4]}", text)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table of Markdown; the cells are Markdown too."""
    return "".join(f"| {' | '.join(line)} |\n" for line in [head, ("---",) * len(head), *rows])


def escaped(text: str) -> str:
    """Text for a table: nothing that Markdown would take for a tag, emphasis or the end of a cell."""
    return text.replace("<", "&lt;").replace("*", r"\*").replace("|", r"\|")


# ---- configuration ----
def keys(classes: list[str]) -> str:
    """Keys of the training YAML. Ours with their help, TRL's with what config_keys.json knows of them."""
    from podtune.sft.config.keys import known_keys

    rows = []
    for name, spec in known_keys().items():
        if spec["class"] not in classes:
            continue
        bounds = (("at_least", "at least"), ("above", "above"))
        bound = "; ".join(f"{words} {spec[key]}" for key, words in bounds if key in spec)
        choices = " ".join(f"`{one}`" for one in spec.get("choices") or [])
        about = "; ".join(text for text in (escaped(spec.get("help", "")), choices, bound) if text)
        rows.append((f"`{name}`", spec["type"], f"`{spec['default']}`", about))
    return table(
        ("key", "type", "default", "meaning" if "RunArguments" in classes else "choices, bounds"), rows
    )


def variables(_: list[str]) -> str:
    """Environment names and the keys they stand for."""
    from podtune.sft.config.keys import environment

    return table(("variable", "key"), [(f"`{name}`", f"`{key}`") for name, key in environment().items()])


def renamed(_: list[str]) -> str:
    """Keys of older versions, and what to write instead."""
    from podtune.sft.config.settings import RENAMED

    return table(("key", "use"), [(f"`{name}`", new) for name, new in RENAMED.items()])


def benchmark(_: list[str]) -> str:
    """Options of one benchmark cell."""
    from podtune.bench.case.command_line import parser

    actions = [action for action in parser()._actions if action.dest != "help"]
    rows = []
    for action in actions:
        choices = " ".join(f"`{one}`" for one in action.choices or [])
        about = "; ".join(text for text in (action.help or "", choices) if text)
        rows.append(
            (
                f"`{action.option_strings[0]}`",
                "needed" if action.required else f"`{action.default}`",
                escaped(about),
            )
        )
    return table(("option", "default", "meaning"), rows)


def rights(_: list[str]) -> str:
    """The Role that podtune's cluster commands need."""
    from podtune.cluster.live.rights import rules

    role = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "podtune-user"},
        "rules": rules(),
    }
    return f"```yaml\n{yaml.safe_dump(role, default_flow_style=None, sort_keys=False, width=120)}```\n"


LEVELS: tuple[Checkpointing, ...] = ("none", "full")


def fits(_: list[str]) -> str:
    """The largest batch of a fine-tune in rows of 1,024 tokens, by model and card."""
    from bisect import bisect

    from podtune.plan.hardware import hardware_row
    from podtune.plan.models import shape_of
    from podtune.plan.plan import USABLE, estimate
    from podtune.plan.setup import TrainingSetup

    models = ("SmolLM2-135M", "Qwen3-0.6B", "Qwen3-1.7B", "SmolLM3-3B", "Llama-3.1-8B")
    cards, most = ("L4", "A10", "L40S", "A100-80", "H100"), 512
    kinds: dict[str, dict[str, Any]] = {
        "LoRA": {"precision": "bf16", "lora_r": 16},
        "full": {"precision": "bf16-autocast"},
        "full, 8-bit Adam": {"precision": "bf16-autocast", "optimizer": "adamw-8bit"},
    }

    def largest(model: str, card: str, kind: str, level: Checkpointing) -> int:
        setup = TrainingSetup(shape_of(model, 1024), "single", 1, fused_head=True, **kinds[kind])
        setup = replace(setup, activation_checkpointing=level)
        usable = USABLE * hardware_row(card).memory_gib
        return bisect(
            range(1, most + 1), usable, key=lambda rows: estimate(replace(setup, batch_size=rows)).total_gib
        )

    def cell(model: str, card: str, kind: str) -> str:
        rows = [largest(model, card, kind, level) for level in LEVELS]
        return " / ".join(f"{most}+" if each == most else str(each) for each in rows) if any(rows) else "-"

    lines = [
        (model, kind, *(cell(model, card, kind) for card in cards)) for model in models for kind in kinds
    ]
    return table(("model", "trained", *cards), lines)


KINDS = {
    "fits": fits,
    "keys": keys,
    "environment": variables,
    "renamed": renamed,
    "benchmark": benchmark,
    "rights": rights,
}

if __name__ == "__main__":
    for page in sorted((ROOT / "docs").glob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = filled(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"wrote {page.relative_to(ROOT)}")
