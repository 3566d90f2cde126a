"""One rule for ``podtune lint --explain``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import yaml

from podtune.cluster.job.manifest import Json
from podtune.cluster.lint import check  # noqa: F401  declares the rules
from podtune.cluster.lint.rules import find

REFUSED_BY = {
    "api": "API server",
    "webhook": "webhook",
    "operator": "operator, API server",
    "hang": "nobody: it hangs or fails",
}


@cache
def examples() -> Json:
    """The good base jobs and the changes for each rule."""
    content: Json = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text(encoding="utf-8"))
    return content


def explanation(code: str) -> str:
    """One rule: its meaning, the fix, a bad and a good example.

    Raises:
        UserError: no rule has this code.
    """
    rule = find(code)
    entry = examples()[rule.code]
    refused = f", refused by: {REFUSED_BY[rule.by]}" if rule.by else ""
    lines = [f"{rule.code} {rule.name} ({rule.severity}{refused})", "", rule.summary, "", f"Fix: {rule.fix}."]
    if "with" in entry:
        kind = "TrainingRuntime" if entry["with"] == "runtime" else entry["with"]["kind"]
        lines += ["", f"In a {kind} that the job uses:"]
    for which in ("bad", "good"):
        example = entry[which]
        text = example if isinstance(example, str) else yaml.safe_dump(example, sort_keys=False, width=110)
        lines += ["", f"{which.capitalize()}:", "", *(f"  {line}" for line in text.strip().splitlines())]
    return "\n".join(lines)
