"""The main job on real input, here: data, a small model, a fine-tune on two processes, one answer before and
after.

    python scripts/demo.py --output demo

Everything is made on this machine: a question-answer set from the documentation strings of the installed
Python packages, a SmolLM3-architecture model of 7 million parameters, and the run itself by the program and
the configuration that a cluster uses. Run again, it resumes; nothing is made twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo"), help=("folder for data, model, run and Aim repo")
    )
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--processes", type=int, default=2, help="local processes")
    parser.add_argument("--name", default="run", help="name of the run, a folder under --output")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate")
    options, more = parser.parse_known_args()  # whatever else is given goes to the training program
    started = time.monotonic()
    data, model, run, aim = (options.output / name for name in ("data", "model", options.name, "aim"))
    say(f"the demo makes everything under {options.output}/ (no GPU, no cluster and no download needed)")
    if not (data / "card.json").exists():
        step(
            ("data: questions and answers from the documentation of the installed packages"),
            "podtune",
            "data",
            "build",
            "--output",
            data,
        )
    if not (model / "config.json").exists():
        step(
            "model: SmolLM3 architecture, about 7 M parameters",
            "podtune",
            "model",
            "build",
            "--size",
            "tiny",
            "--data",
            data,
            "--output",
            model,
        )
    step(
        f"fine-tune: {options.processes} processes, {options.steps} steps",
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            options.processes,
        ),
        *("-m", "podtune.training", "--config", ROOT / "deploy" / "demo.yaml"),
        *("--model_name_or_path", model, "--dataset_name", data, "--output_dir", run, "--aim_repo", aim),
        *("--max_steps", options.steps, "--learning_rate", options.learning_rate, *more),
    )
    record = json.loads((run / "run.json").read_text())
    closing(record, options.output, run, aim, time.monotonic() - started)
    return 0


def say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def step(title: str, *command: object) -> None:
    """Run one command, shown as it could be typed; the demo ends where a step fails."""
    words = [str(word) for word in command]
    say(title)
    print(
        "$ " + " ".join(words).replace((f"{sys.executable} -m torch.distributed.run"), "torchrun"), flush=True
    )
    threads = str(max(1, (os.cpu_count() or 1) // 2))  # torchrun would say at length that it chooses 1
    done = subprocess.run(words, cwd=ROOT, env={"OMP_NUM_THREADS": threads, **os.environ})
    if done.returncode:
        raise SystemExit(done.returncode)


def closing(record: dict[str, Any], output: Path, run: Path, aim: Path, seconds: float) -> None:
    """The last screen: what was made, one answer before and after, and what to type next."""
    measured = record["measurements"]
    loss, answers = measured["loss"], measured.get("answers")
    say(f"done in {seconds:.0f} s")
    print(f"eval loss      {loss['eval_first']:.3f} -> {loss['eval']:.3f}")
    if "tokens_per_s" in measured:
        print(
            f"speed          {measured['tokens_per_s']:,.0f} real tokens/s, "
            f"{measured['peak_memory_gib']['max']:.1f} GiB a process at most"
        )
    if answers:
        base, tuned, sample = answers["base"], answers["tuned"], answers["samples"][0]
        print(
            f"exact match    {base['exact_match']:.1%} -> {tuned['exact_match']:.1%} of "
            f"{answers['rows']} "
            "held-out questions"
        )
        print(f"question       {sample['prompt']}\n  reference    {sample['reference']}")
        print(f"  before       {sample['base'][:110]}\n  after        {sample['tuned'][:110]}")
    print(f"model          {run / 'final'}")
    print(f"metrics        {run / 'metrics.jsonl'}, {run / 'run.json'}, {run / 'loss.png'}")
    print(f"Aim repo       {aim}")
    print("\nnext:")
    print(
        f"  .venv/bin/podtune compare {run} {output / 'slower'}    # after: make demo DEMO_ARGS='--name "
        "slower --learning-rate 5e-4'"
    )
    print(f"  .venv/bin/aim up --repo {aim}    # the curves in a browser")
    print(
        "  make demo DEMO_ARGS='--steps 600 --allow_resume_change'    # resume from the last checkpoint, "
        "for 200 steps more"
    )


if __name__ == "__main__":
    raise SystemExit(main())
