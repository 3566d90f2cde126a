"""The main job on real input, here: questions, a small model, a fine-tune on two processes, and how many
held-out questions it answers before and after.

    python scripts/demo.py --output demo

Everything is made on this machine: questions about the characters of Unicode from Python's own database, a
SmolLM3-architecture model with random weights, and the run itself by the program and the configuration
(deploy/demo.yaml) that a cluster uses. Run again, it resumes; nothing is made twice. Other options go to the
training program.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from podtune.report.compare.answers import readable

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for all that is made")
    parser.add_argument("--processes", default="2", help="local processes")
    parser.add_argument("--name", default="run", help="name of the run, a folder under --output")
    options, more = parser.parse_known_args()
    if not options.output.is_absolute():
        options.output = Path(os.path.relpath(options.output.absolute(), ROOT))
    os.chdir(ROOT)
    started = time.monotonic()
    data, model, run, aim = (options.output / name for name in ("data", "model", options.name, "aim"))
    say(f"the demo makes everything under {options.output}/ (no GPU, no cluster and no download needed)")
    if not (data / "card.json").exists():
        step("data: questions and answers", "data", "build", "--output", data)
    if not (model / "config.json").exists():
        step(
            "model: SmolLM3 architecture with random weights, a tokenizer for these questions",
            *("model", "build", "--size", "micro", "--data", data, "--output", model),
        )
    step(
        f"fine-tune: {options.processes} processes",
        *("train", "-n", options.processes, "--config", "deploy/demo.yaml"),
        *("--model_name_or_path", model, "--dataset_name", data, "--output_dir", run, "--aim_repo", aim),
        *more,
    )
    closing(json.loads((run / "run.json").read_text()), options, run, time.monotonic() - started)
    return 0


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def step(title: str, *words: object) -> None:
    """Run one podtune command, shown as it could be typed; the demo ends where a step fails."""
    command = ["podtune", *map(str, words)]
    say(title)
    print("$ " + " ".join(command), flush=True)
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise SystemExit(code)


def closing(record: dict[str, Any], options: argparse.Namespace, run: Path, seconds: float) -> None:
    """The last screen: held-out questions answered before and after, some of them, and what to type next."""
    measured = record["measurements"]
    loss, answers = measured["loss"], measured.get("answers")
    say(f"done in {seconds:.0f} s")
    print(f"eval loss      {loss['eval_first']:.3f} -> {loss['eval']:.3f}")
    if "tokens_per_s" in measured:
        memory = measured["peak_memory_gib"]["max"]
        print(f"speed          {measured['tokens_per_s']:,.0f} real tokens/s, {memory:.1f} GiB a process")
    if answers:
        print("\n".join(["", *answer_lines(answers)]))
    print(f"\nmodel          {run / 'final'}")
    print(f"metrics        {run / 'metrics.jsonl'}, {run / 'run.json'}, {run / 'loss.png'}")
    print("\nnext:")
    if answers:
        question = answers["samples"][-1]["prompt"]
        print(f'  .venv/bin/podtune generate {run} --prompt "{question}"    # ask it yourself')
    others = [file.parent for file in sorted(options.output.glob("*/run.json")) if file.parent != run]
    hint = "" if others else "    # after: make demo DEMO_ARGS='--name slower --learning_rate 3e-4'"
    print(f"  .venv/bin/podtune compare {run} {others[0] if others else options.output / 'slower'}{hint}")
    print(f"  .venv/bin/podtune aim-ui --repo {options.output / 'aim'}    # the curves in a browser")


def answer_lines(answers: dict[str, Any]) -> list[str]:
    """Exact match by kind of question, beside what the most frequent answers would score; three right answers
    and a wrong one.
    """
    base, tuned = answers["base"]["exact_match"], answers["tuned"]["exact_match"]
    lines = [
        f"held-out questions answered exactly   {base:.1%} -> {tuned:.1%} of {answers['rows']}"
        f"   (the most frequent answer of each kind: {answers['most_frequent_answer']:.1%})"
    ]
    for kind, score in answers.get("by_kind", {}).items():
        lines.append(f"  {kind:<12} {score['base']:>6.1%} -> {score['tuned']:>6.1%} of {score['rows']}")
    right = [sample for sample in answers["samples"] if sample["tuned"] == sample["reference"]]
    wrong = [sample for sample in answers["samples"] if sample["tuned"] != sample["reference"]]
    for sample in [*right[:3], *wrong[:1]]:
        verdict = "right" if sample in right else f"wrong: {sample['reference']}"
        lines += [
            f"  {sample['prompt']}",
            f"    before   {readable(sample['base'])[:90]}",
            f"    after    {sample['tuned'][:90]}   ({verdict})",
        ]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
