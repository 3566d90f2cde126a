"""Measure one NVIDIA GPU in four parts of at most nine minutes, without a network.

    python scripts/gpu_figures.py --part 1 --minutes 9 --out build/gpu   # 1 to 4; again: what is missing
    python scripts/gpu_figures.py --report build/gpu                     # docs/results/gpu.md
    python scripts/gpu_figures.py --rehearse --out DIR                   # parts 2 to 4 on a CPU, tiny

Part 1: kernels, losses and exits (tests/gpu); 2: the benchmark; 3: LoRA of a 3B model; 4: all of its weights,
and the share of each kind of kernel in a step with LoRA.
Models have random weights that are made on the card. Each measurement is a process of its own and leaves
DIR/NAME.json as soon as it has ended; none is begun that may not end within the minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = [
    *(
        "podtune.benchmark",
        "podtune.bench.case.loop",
        "podtune.sft.config.resolve",
        "podtune.sft.train.build",
    ),
    *("podtune.sft.train.run", "podtune.sft.data.rows", "podtune.sft.model.load", "matplotlib.figure"),
    *("matplotlib.backends.backend_agg", "transformers.models.smollm3.modeling_smollm3"),
]


@dataclass(frozen=True)
class Shapes:
    """Sizes of what is measured."""

    gpt: str = "tinygpt-124m"
    resnet: str = "resnet50"
    batch: str = "32"
    steps: str = "10"
    width: int = 2048
    layers: int = 36
    vocabulary: int = 128256
    lengths: tuple[str, str] = ("1024", "2048")  # tokens a row
    rows: tuple[str, str] = ("8", "28")  # a batch
    words_a_row: int = 1200
    file_rows: int = 400


TINY = Shapes("tinygpt-test", "resnet18-cifar", "4", "2", 64, 2, 1024, ("32", "48"), ("2", "4"), 20, 40)


@dataclass(frozen=True)
class Expected:
    """Range in which a figure should lie, and the source of the range."""

    low: float
    high: float
    source: str

    def verdict(self, figure: float | None) -> str:
        """One word for the report."""
        if figure is None:
            return "not measured"
        return "BELOW" if figure < self.low else "ABOVE" if figure > self.high else "as expected"


@dataclass(frozen=True)
class Measurement:
    """One process: a program's words, and what its figures should be."""

    name: str
    part: int
    program: str  # tests, benchmark or training
    words: tuple[str, ...]
    seconds: float = 90.0  # that it may take, loading included
    expected: dict[str, Expected] = field(default_factory=dict)


def card() -> str:
    """Name of the first GPU, or cpu."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def counted(h100: float, h200: float) -> dict[str, Expected]:
    """Range of a speed in tokens/s that was counted by operation for these two cards."""
    speed = next((speed for kind, speed in (("H200", h200), ("H100", h100)) if kind in card()), None)
    if not speed:
        return {}
    return {"tokens_per_s": Expected(0.8 * speed, 1.2 * speed, f"counted: {speed:,.0f} ±20 %")}


def measurements(shapes: Shapes) -> list[Measurement]:
    """All of them, in the order in which they are taken."""
    found = [
        Measurement("kernels", 1, "tests", ("tests/gpu/test_kernels.py",), 150),
        Measurement("training", 1, "tests", ("tests/gpu/test_training.py",), 330),
    ]
    parity = {"parity": Expected(1, 1, "losses of one process")}
    planned = {"memory_error": Expected(-0.15, 0.15, "the plan within 15 %")}
    cpu = ("--cpu", "--global-batch-size", "2") if shapes == TINY else ()

    def case(name: str, *words: str, speed: dict[str, Expected] | None = None, seconds: float = 60) -> None:
        common = ("--precision", "bf16", "--steps", shapes.steps, "--warmup", "2", "--repeats", "1", *cpu)
        expected = parity | (speed or {})
        found.append(Measurement(name, 2, "benchmark", (*words, *common), seconds, expected))

    def run(name: str, part: int, *words: str, speed: dict[str, Expected], seconds: float = 110) -> None:
        common = ("--max_steps", shapes.steps, "--max_length", shapes.lengths[0])
        batch = ("--per_device_train_batch_size", shapes.rows[0])
        words = (*common, *batch, *words)
        found.append(Measurement(name, part, "training", words, seconds, planned | speed))

    gpt = ("--model", shapes.gpt, "--global-batch-size", shapes.batch)
    case("gpt2-eager", *gpt, "--strategy", "single", speed=counted(340e3, 380e3))
    if shapes != TINY:
        compiled = ("--strategy", "single", "--compile")
        case("gpt2-compiled", *gpt, *compiled, speed=counted(500e3, 520e3), seconds=120)
    for strategy in ("ddp", "fsdp", "zero2", "zero3"):
        case(f"gpt2-{strategy}", *gpt, "--strategy", strategy)
    for norm in ("group", "batch"):
        case(f"resnet-{norm}-norm", "--model", shapes.resnet, "--strategy", "single", "--norm", norm)

    lora = ("--use_peft", "--lora_r", "16", "--lora_dropout", "0")
    full, none = (("--activation_checkpointing", word) for word in ("true", "false"))
    own = ("--use_liger_kernel", "false")  # the figures below were counted for the model's own code
    run("lora-checkpointed", 3, *lora, *full, *own, speed=counted(20.5e3, 23.3e3))
    run("lora-whole", 3, *lora, *none, *own, speed=counted(28.6e3, 32.7e3))
    if shapes != TINY:
        run("lora-liger", 3, *lora, *none, speed=counted(37.9e3, 40.6e3))
    run("lora-as-chosen", 3, *lora, speed=counted(37.9e3, 40.6e3))
    run("lora-dropout", 3, *lora, "--lora_dropout", "0.05", *full, speed={})
    for length in shapes.lengths:
        wide = ("--per_device_train_batch_size", shapes.rows[1], "--max_length", length)
        run(f"lora-{shapes.rows[1]}x{length}", 3, *lora, *full, *wide, speed={})
    run("full-checkpointed", 4, *full, *own, speed=counted(15.5e3, 17.9e3), seconds=150)
    run("full-whole", 4, *none, *own, speed=counted(19e3, 22e3), seconds=150)
    shares = {} if shapes == TINY else {"elementwise_share": Expected(0.3, 0.5, "counted: 0.41 of a step")}
    run("lora-profile", 4, *lora, *none, *own, speed=shares)
    if shapes != TINY:
        run("full-compiled", 4, *full, "--torch_compile", "true", speed={}, seconds=240)
    return found


def main() -> int:
    """Take the measurements of a part that are missing, or write the report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=(1, 2, 3, 4), help="default: all")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the JSON files")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, a GPU's branch on a CPU")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write docs/results/gpu.md from DIR")
    arguments = parser.parse_args()
    if arguments.report:
        print(f"wrote {report(arguments.report)}")
        return 0
    from podtune.machine.facts import visible_gpus

    if not visible_gpus() and not arguments.rehearse:
        print("gpu_figures: there is no NVIDIA GPU here; --rehearse runs it on a CPU", file=sys.stderr)
        return 69
    if arguments.rehearse:
        os.environ |= {"PODTUNE_FORCE_GPU_PATH": "1", "DS_ACCELERATOR": "cpu"}
    shapes = TINY if arguments.rehearse else Shapes()
    parts = (2, 3, 4) if arguments.rehearse else (1, 2, 3, 4)
    chosen = [one for one in measurements(shapes) if one.part in parts and arguments.part in (None, one.part)]
    deadline = time.monotonic() + 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    with material(arguments.out, shapes) as (model, rows):
        for one in chosen:
            file = arguments.out / f"{one.name}.json"
            if file.exists():
                continue
            if time.monotonic() + one.seconds > deadline:
                print(f"{one.name}: left for another call, the {arguments.minutes:g} minutes are nearly over")
                continue
            found = take(one, model, rows)
            failed += "error" in found
            file.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{one.name}: {found.get('error') or found['figures']}", flush=True)
    return 1 if failed else 0


@contextlib.contextmanager
def material(out: Path, shapes: Shapes) -> Iterator[tuple[Callable[[], Path], Path]]:
    """Yield a function that makes the model when it is first needed, and a file of long enough rows."""
    rows, folder, draw = out / "rows.jsonl", out / "model", random.Random(0)

    def row() -> str:
        return json.dumps({"text": " ".join(str(draw.randrange(10**6)) for _ in range(shapes.words_a_row))})

    def model() -> Path:
        if not (folder / "config.json").exists():
            isolated(make_model, folder, shapes)
        return folder

    rows.write_text("".join(f"{row()}\n" for _ in range(shapes.file_rows)))
    try:
        yield model, rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # 6 GB


def make_model(folder: Path, shapes: Shapes) -> None:
    """Make a SmolLM3 with random weights in bf16, and a small tokenizer of podtune's own."""
    import torch
    from transformers import AutoModelForCausalLM, SmolLM3Config

    from podtune.demo_data.build import build
    from podtune.sft.model.build import build_model

    data = folder.with_name("data")
    build(data, rows=200)
    build_model("micro", data, folder)
    config = SmolLM3Config(
        hidden_size=shapes.width,
        intermediate_size=round(5.375 * shapes.width),
        num_hidden_layers=shapes.layers,
        vocab_size=shapes.vocabulary,
        num_attention_heads=16,
        num_key_value_heads=4,
        pad_token_id=0,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)


def take(one: Measurement, model: Callable[[], Path], rows: Path) -> dict[str, Any]:
    """Run a measurement; return its figures, what was expected of each, and the verdicts."""
    began, output, words = time.monotonic(), rows.parent / "run", list(one.words)
    found: dict[str, Any] = {"name": one.name, "part": one.part, "card": card(), "figures": {}}
    shutil.rmtree(output, ignore_errors=True)
    try:
        if one.program == "tests":
            found["figures"] = run_tests(words, one.seconds)
        else:
            words += ["--output" if one.program == "benchmark" else "--output_dir", str(output)]
            if one.program == "training":
                words += ["--model_name_or_path", str(model()), "--dataset_name", str(rows)]
                words += ["--save_strategy", "no", "--logging_steps", "1", "--seed", "7"]
            profile = rows.parent / "profile.json" if one.name.endswith("-profile") else None
            isolated(run_program, f"podtune.{one.program}", words, profile, limit_s=2 * one.seconds)
            found["figures"] = figures(json.loads((output / "run.json").read_text()))
            if profile:
                found["figures"] |= json.loads(profile.read_text())
                profile.unlink()  # the folder holds one file a measurement
    except Exception as error:  # the other measurements are worth their minutes all the same
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {error}"[:500]
    shutil.rmtree(output, ignore_errors=True)  # final/ is 12 GB
    return found | {
        "expected": {name: asdict(each) for name, each in one.expected.items()},
        "verdicts": {name: each.verdict(found["figures"].get(name)) for name, each in one.expected.items()},
        "words": words,
        "seconds": round(time.monotonic() - began, 1),
    }


def run_tests(words: list[str], seconds: float) -> dict[str, float]:
    """Outcome of each test of pytest: 1 passed, 0 failed; what is skipped is absent."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "gpu and not slow", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * seconds)
    print(done.stdout[-4000:], flush=True)
    outcomes = [
        line.split()[:2] for line in done.stdout.splitlines() if line.startswith(("PASSED", "FAILED"))
    ]
    return {name.partition("::")[2]: float(outcome == "PASSED") for outcome, name in outcomes}


def run_program(module: str, words: list[str], profile: Path | None = None) -> None:
    """Run a program as it is run in a pod; the child's side. ``profile`` gets the shares of its kernels."""
    import torch
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    profiler = torch.profiler.profile(activities=[activity]) if profile else contextlib.nullcontext()
    with profiler as kernels:
        code = importlib.import_module(module).main(words)
    if profile and kernels:
        times = {
            each.key: float(each.self_device_time_total if on_gpu else each.self_cpu_time_total)
            for each in kernels.key_averages()
        }
        profile.write_text(json.dumps(shares_of_kernels(times)))
    sys.stdout.flush()
    raise SystemExit(code)


#: kinds of kernels by what their names contain on a GPU, or of torch's operators on a CPU; the first counts
KERNELS = {
    "attention": ("flash", "fmha", "attention"),
    "product": ("gemm", "cutlass", "xmma", "nvjet", "aten::mm", "aten::addmm", "aten::bmm"),
    "elementwise": (
        *("elementwise", "triton_poi", "reduce_kernel"),
        *("aten::mul", "aten::add", "aten::copy_", "aten::silu"),
    ),
}


def shares_of_kernels(times: dict[str, float]) -> dict[str, float]:
    """Each kind's share of the time of all kernels; what is of no kind (optimizer, loss) has none."""
    found = dict.fromkeys(KERNELS, 0.0)
    for name, time_s in times.items():
        words = name.lower()
        kind = next((kind for kind, parts in KERNELS.items() if any(part in words for part in parts)), None)
        if kind:
            found[kind] += time_s
    total = sum(times.values()) or 1.0
    return {f"{kind}_share": round(time_s / total, 4) for kind, time_s in found.items()}


def isolated(function: Callable[..., None], *arguments: Any, limit_s: float = 600.0) -> None:
    """Run ``function`` in a process that has torch loaded and no CUDA context yet; its memory ends with it.

    Raises:
        RuntimeError: it ended with another code than 0, or not within ``limit_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=function, args=arguments)
    process.start()
    process.join(limit_s)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise RuntimeError(f"not ended within {limit_s:.0f} s")
    if process.exitcode:
        raise RuntimeError(f"ended with {process.exitcode}")


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Figures of a record that the report shows; what was not measured is absent."""
    measured = record["measurements"]
    found = {name: measured.get(name) for name in ("tokens_per_s", "samples_per_s", "mfu")} | {
        "peak_gib": measured.get("peak_memory_gib", {}).get("max"),
        "memory_error": measured.get("memory_estimate", {}).get("error"),
        "step_p50_s": measured.get("step_time_s", {}).get("p50"),
        "parity": {"ok": 1.0, "failed": 0.0}.get(measured.get("parity", {}).get("status")),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def report(folder: Path) -> Path:
    """Write the table of all JSON files of ``folder``: docs/results/gpu.md, of a rehearsal beside them."""
    found = sorted(
        (json.loads(file.read_text()) for file in folder.glob("*.json")), key=lambda one: one["part"]
    )
    cards = sorted({one["card"] for one in found})
    lines = [
        "# Figures of a GPU\n",
        f"`python scripts/gpu_figures.py --part 1` to `4`, then `--report`; on: {', '.join(cards)}.\n",
        "| measurement | figure | measured | expected | verdict |\n|---|---|---|---|---|",
    ]
    for one in found:
        if "error" in one:
            lines.append(f"| {one['name']} | | {one['error']} | | FAILED |")
        for name in one["figures"] | one["verdicts"]:
            figure, expected = one["figures"].get(name), one["expected"].get(name, {})
            shown = "-" if figure is None else f"{figure:,.4g}"
            verdict = one["verdicts"].get(name) or ("FAILED" if one["part"] == 1 and not figure else "")
            lines.append(f"| {one['name']} | {name} | {shown} | {expected.get('source', '')} | {verdict} |")
    target = folder / "gpu.md" if "cpu" in cards else ROOT / "docs/results/gpu.md"
    target.write_text("\n".join(lines) + "\n")
    return target


if __name__ == "__main__":
    raise SystemExit(main())
