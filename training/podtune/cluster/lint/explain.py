"""The rules as documentation: one entry for ``podtune lint --explain``, a table of all for docs/lint.md."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from podtune.cluster.lint import check
from podtune.cluster.lint.diagnostic import Json
from podtune.cluster.lint.rules import RULES, Rule
from podtune.cluster.lint.targets import Target
from podtune.run.errors import UserError, near

YAML_RULE = (
    *("PT001", "error", "not-yaml"),
    "kubectl refuses a file that is not YAML, or that gives a key twice.",
    "correct it",
)
#: who refuses what a rule finds, as the table says it
REFUSED_BY = {
    "api": "API server",
    "webhook": "webhook",
    "operator": "operator, API server",
    "hang": "nobody: it hangs",
}
GROUPS = {
    "PT0": ("Refused, or taken and never run", "What the API server, a webhook or the operator makes of it."),
    "PT1": ("Start and rendezvous", "How the processes start and find each other."),
    "PT2": ("Restart and end", "How the job restarts, ends and gives its GPUs back."),
    "PT3": ("Resources and volumes", "What a pod asks of the cluster."),
    "PT4": ("Network, images and secrets", "What a pod relies on, and what it gives away."),
    "PT5": ("TrainJobs and runtimes", "Kubeflow Trainer's webhooks, JobSet, and what they drop."),
}


@cache
def examples() -> Json:
    """The good base jobs and the changes for each rule."""
    content: Json = yaml.safe_load(Path(__file__).with_name("examples.yaml").read_text(encoding="utf-8"))
    return content


def example(code: str, which: str) -> str:
    """The whole manifest of a rule's bad or good example, as YAML."""
    entry = examples()[code]
    if isinstance(entry[which], str):
        return str(entry[which])
    base: Json = yaml.safe_load(examples()[entry.get("changes") or ("trainjob" if code > "PT5" else "base")])
    if "with" not in entry:
        return _dump([merged(base, entry[which])])
    beside = yaml.safe_load(examples()["runtime"]) if entry["with"] == "runtime" else entry["with"]
    return _dump([merged(beside, entry[which]), merged(base, entry.get("job", {}))])


def merged(base: Any, change: Any) -> Any:
    """``base`` with ``change``: mappings by key, lists of named things by name; null removes."""
    if isinstance(base, dict) and isinstance(change, dict):
        result = copy.deepcopy(base)
        for key, value in change.items():
            if value is None:
                result.pop(key, None)
            elif key == "$rename":
                result["name"] = value
            else:
                result[key] = merged(result.get(key), value)
        return result
    if (
        isinstance(base, list)
        and isinstance(change, list)
        and all(isinstance(item, dict) and "name" in item for item in (*base, *change))
    ):
        if all("mountPath" in item for item in (*base, *change)):
            return [*copy.deepcopy(base), *change]
        changes = {item["name"]: item for item in change}
        kept = [merged(item, changes.pop(item["name"], {})) for item in base]
        return [*kept, *changes.values()]
    return copy.deepcopy(change)


def explanation(code: str) -> str:
    """One rule: what it means, the fix, a bad and a good example."""
    code, codes = code.upper(), [YAML_RULE[0], *(rule.code for rule in RULES)]
    if code not in codes:
        raise UserError(
            f"{code!r} is not a rule{near(code, codes)}", fix="see docs/lint.md for all of them", code=2
        )
    rule = next((rule for rule in RULES if rule.code == code), None)
    name, severity, summary, fix = _facts(rule)
    entry = examples()[code]
    refused = f", refused by: {REFUSED_BY[rule.by]}" if rule and rule.by else ""
    lines = [f"{code} {name} ({severity}{refused})", "", summary, "", f"Fix: {fix}."]
    if rule and rule.values:
        lines.append(f"In the values of podtune's chart: {rule.values}.")
    if "with" in entry:
        kind = "TrainingRuntime" if entry["with"] == "runtime" else entry["with"]["kind"]
        lines += ["", f"In a {kind} that the job uses:"]
    for which in ("bad", "good"):
        content = entry[which] if isinstance(entry[which], str) else _dump([entry[which]])
        lines += ["", f"{which.capitalize()}:", "", *(f"  {line}" for line in content.strip().splitlines())]
    return "\n".join(lines)


def reference() -> str:
    """docs/lint.md."""
    lines = [
        "# What podtune lint finds",
        "",
        "Written by `python scripts/build_lint_docs.py` from the rules; do not edit.",
        "",
        (
            "- **error**: the API server, a webhook or the operator refuses it, or it certainly hangs or"
            " never ends, whatever the script does. The column *refused by* says which. Exit code 65."
        ),
        "- **warning**: likely to hurt: hours of GPUs, a lost model, a leaked token. It runs.",
        "- **note**: a matter of taste, or of the cluster. The notes of a job share one line.",
        "",
        (
            "A rule's severity is its highest; the text says where it is lower. `podtune lint --explain"
            " PT105` prints one rule with a bad and a good example."
        ),
        "",
        "## Use",
        "",
        *_USE,
        "",
        f"Checked for: {Target()}; `--target operator=1.9,trainer=2.1,kubernetes=1.34` chooses.",
        "",
    ]
    entries = sorted([(*YAML_RULE, "api"), *(_row(rule) for rule in RULES)])
    for prefix, (title, text) in GROUPS.items():
        lines += [f"## {title}", "", text, "", "| code | severity | refused by | what it means | fix |"]
        lines += ["|---|---|---|---|---|"]
        for code, severity, name, summary, fix, by in entries:
            if code.startswith(prefix):
                cells = (f"{code} {name}", severity, REFUSED_BY.get(by, ""), summary, fix)
                lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


_USE = (
    "| to | write |",
    "|---|---|",
    (
        "| lint files, directories, globs, stdin | `podtune lint job.yaml deploy/ 'jobs/*.yaml'`; "
        "`kustomize build . \\| podtune lint -` |"
    ),
    "| leave a rule out | `--ignore PT204,PT404` |",
    (
        '| silence it at one place, with a reason | the annotation `lint.podtune/ignore: "PT204: saves in 5'
        ' s"` on the job, the runtime or the pod template |'
    ),
    (
        "| set it for a repository | `.podtune-lint.yaml` with `ignore` (a list, or code: reason), `fail-on`,"
        " `fail-if-none`, `target` |"
    ),
    "| fail on warnings too, or never | `--fail-on warning`, `--fail-on never` |",
    "| fail where no job was found | `--fail-if-none` |",
    "| read it by a machine | `--format json`, `github`, `sarif` |",
    "| run it before a commit, or in an action | `.pre-commit-hooks.yaml`; `action.yml` |",
    "",
    (
        "Jobs are found in Lists, AppWrappers and Katib's trialSpec, too; claims, runtimes and ConfigMaps are"
        " looked up across all files given. In a directory the templates of charts and the patches of"
        " kustomize are left out, as they are parts of objects only."
    ),
    "A value that envsubst or a template fills in (`${NAME}`) is not judged.",
    (
        "`podtune submit` refuses what the API server, a webhook or the operator would refuse, names the"
        " rest, and refuses nothing with `--no-lint`."
    ),
)


def _row(rule: Rule) -> tuple[str, str, str, str, str, str]:
    return rule.code, rule.severity, rule.name, rule.summary, rule.fix, rule.by


def _facts(rule: Rule | None) -> tuple[str, str, str, str]:
    if rule is None:
        _, severity, name, summary, fix = YAML_RULE
        return name, severity, summary, fix
    return rule.name, rule.severity, rule.summary, rule.fix.rstrip(".")


def _dump(documents: list[Json]) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=110)


__all__ = ["check", "example", "examples", "explanation", "merged", "reference"]
