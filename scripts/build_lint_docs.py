"""Write docs/lint.md from the rules of `podtune lint`.

python scripts/build_lint_docs.py
"""

from pathlib import Path

from podtune.cluster.lint.explain import REFUSED_BY
from podtune.cluster.lint.rules import RULES
from podtune.cluster.lint.targets import Target

TARGET = Path(__file__).resolve().parents[1] / "docs/lint.md"
GROUPS = {
    "PT0": ("Refused, or taken and never run", "What the API server, a webhook or the operator makes of it."),
    "PT1": ("Start and rendezvous", "How the processes start and find each other."),
    "PT2": ("Restart and end", "How the job restarts, ends and gives its GPUs back."),
    "PT3": ("Resources and volumes", "What a pod asks of the cluster."),
    "PT4": ("Network, images and secrets", "What a pod relies on, and what it gives away."),
    "PT5": ("TrainJobs and runtimes", "Kubeflow Trainer's webhooks, JobSet, and what they drop."),
    "PT6": (
        "Jobs without an operator",
        "Kubernetes' own Job, where its pods are the processes of one training.",
    ),
}
USE = (
    "| to | write |",
    "|---|---|",
    (
        "| lint files, directories, globs, stdin | `podtune lint job.yaml deploy/ 'jobs/*.yaml'`; "
        "`kustomize build . \\| podtune lint -` |"
    ),
    "| leave a rule out | `--ignore PT204,PT404` |",
    (
        '| silence it at one place, with a reason | the annotation `lint.podtune/ignore: "PT204: saves in 5'
        ' s"` on the job or the runtime |'
    ),
    "| fail on warnings too, or never | `--fail-on warning`, `--fail-on never` |",
    "| fail where no job was found | `--fail-if-none` |",
    "| read it by a machine | `--format json`, `github`, `sarif` |",
    "| run it before a commit, or in an action | `.pre-commit-hooks.yaml`; `action.yml` |",
    "",
    (
        "A Job of Kubernetes counts where it is Indexed or parallel and names torchrun or its variables."
        " Jobs are found in Lists, AppWrappers and Katib's trialSpec, too; claims, runtimes and ConfigMaps"
        " are looked up across all files given. In a directory the templates of charts and the patches of"
        " kustomize are left out, as they are parts of objects only. What"
        " is not YAML in a file without the name of one of the kinds is another program's."
    ),
    "A value that envsubst or a template fills in (`${NAME}`) is not judged.",
    "`podtune submit` refuses what the API server, a webhook or the operator would, and names the rest.",
)


def reference() -> str:
    """The text of docs/lint.md."""
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
        *USE,
        "",
        f"Checked for: {Target()}; `--target operator=1.9,trainer=2.1` chooses.",
        "",
    ]
    for prefix, (title, text) in GROUPS.items():
        lines += [f"## {title}", "", text, "", "| code | severity | refused by | what it means | fix |"]
        lines += ["|---|---|---|---|---|"]
        for rule in sorted(RULES, key=lambda rule: rule.code):
            if rule.code.startswith(prefix):
                by, fix = REFUSED_BY.get(rule.by, ""), rule.fix.rstrip(".")
                cells = (f"{rule.code} {rule.name}", rule.severity, by, rule.summary, fix)
                lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(reference(), encoding="utf-8")
    print(TARGET)
