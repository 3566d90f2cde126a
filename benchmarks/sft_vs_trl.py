"""Podtune's fine-tuning against the script that a user of plain TRL would write, on identical batches,
interleaved.

    python benchmarks/sft_vs_trl.py                                   # random short rows, one process
    python benchmarks/sft_vs_trl.py --processes 2 --rows mixed        # two gloo ranks under torchrun
    python benchmarks/sft_vs_trl.py --rows full --lora                # adapters alone are trained
    python benchmarks/sft_vs_trl.py --model demo/model --data demo/data/train.parquet --rows data

Plain TRL is ``SFTTrainer`` with its defaults: padded batches, bf16, activation checkpointing. Each side has
processes of its own, which take turns; both start from the same weights and see the same rows in every step,
which is checked. A speed is worth nothing without its equality: six steps in fp32 are run first, and the
program ends with exit code 1 if loss or gradient norm differ by more than 1e-5.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SIDES = ("trl", "podtune")
WARMUP = 2  # steps before the clock starts
TOLERANCE = 1e-5
TURN_S = 6 * 3600.0  # how long a side waits for its turn


@dataclass
class Outcome:
    """One ``train()`` of one side. Times are of the timed steps alone; ``cpu_s`` is user and system time of
    all ranks.
    """

    tokens: int
    wall_s: float
    cpu_s: float
    losses: list[float]
    grad_norms: list[float]
    steps: list[list[str]] = field(repr=False)  # for every step, the sorted digests of the rows of all ranks


def main() -> int:
    """Run what the command line asks for and print the table."""
    args = arguments()
    if args.side:
        serve(args)
        return 0
    from podtune.machine.facts import cpu_threads
    from podtune.run.world import World

    args.threads = args.threads or cpu_threads(World(local_world_size=args.processes))
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(Side(name, args)) for name in SIDES}
        precise = {name: side.train(steps=6, seed=1, fp32=True) for name, side in sides.items()}
        differences = compare(precise)
        timed: dict[str, list[Outcome]] = {name: [] for name in SIDES}
        for repeat in range(args.repeats):
            for name in SIDES if repeat % 2 == 0 else reversed(SIDES):
                timed[name].append(sides[name].train(steps=args.steps, seed=100 + repeat))
            compare({name: timed[name][-1] for name in SIDES})
    print_table(args, differences, timed)
    return int(max(differences.values()) > TOLERANCE)


class Side:
    """The processes of one side, which train when they are told to and wait in between. They are its own
    because the C library's heap and oneDNN's caches, and what is set of them, belong to a process.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name = name
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.processes)]
        command = [sys.executable, *(torchrun if args.processes > 1 else []), __file__, *sys.argv[1:]]
        self.process = subprocess.Popen(
            [*command, "--side", name, "--threads", str(args.threads)],
            env=os.environ | {"OMP_NUM_THREADS": str(args.threads)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *failure: object) -> None:
        """Without another line to read, it ends by itself."""
        if failure[0]:
            self.process.terminate()
        self.process.communicate()

    def train(self, **what: Any) -> Outcome:
        """What :func:`run` returns for these arguments."""
        told, answer = self.process.stdin, self.process.stdout
        assert told is not None
        assert answer is not None
        print(json.dumps(what), file=told, flush=True)
        if line := answer.readline():
            return Outcome(**json.loads(line))
        sys.exit(f"{self.name} ended without a result: see above")


def serve(args: argparse.Namespace) -> None:
    """One rank of one side. Rank 0 reads what to train, a line of JSON on stdin, and writes what it gave."""
    from podtune.machine.facts import cpu_threads
    from podtune.run.distributed import cleanup_distributed, setup_distributed
    from podtune.run.library_environment import set_library_environment
    from podtune.run.world import read_world

    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers, tempfile.TemporaryDirectory() as scratch:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for whatever libraries print
        if args.side == "podtune":
            set_library_environment(cpu_threads(read_world()))
        world = setup_distributed(TURN_S, use_cpu=True)
        import datasets
        import torch
        import torch.distributed as dist

        torch.set_num_threads(args.threads)
        datasets.disable_progress_bars()
        model, tokenizer = load_model(args)
        rows = load_rows(args, tokenizer)
        while True:
            line = [sys.stdin.readline() if world.is_main else ""]
            if world.world_size > 1:
                dist.broadcast_object_list(line)
            if not line[0]:
                break
            outcome = run(args.side, args, world, model, tokenizer, rows, scratch, **json.loads(line[0]))
            if world.is_main:
                print(json.dumps(asdict(outcome)), file=answers, flush=True)
        cleanup_distributed()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        help=("model folder with a tokenizer; default: SmolLM3 architecture, 7.0 M random parameters"),
    )
    parser.add_argument("--data", type=Path, help="Parquet or JSONL with the rows, for --rows data")
    parser.add_argument(
        "--rows", choices=("short", "mixed", "full", "data"), default="short", help="lengths of the rows"
    )
    parser.add_argument("--lora", action="store_true", help="LoRA of rank 16 on all linear layers")
    parser.add_argument("--processes", type=int, default=1, help="data-parallel ranks, started with torchrun")
    parser.add_argument("--threads", type=int, help="threads a rank; default: its share of the CPUs")
    parser.add_argument("--batch", type=int, default=8, help="rows a rank and step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps a repeat")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved pairs")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    if (args.rows == "data") != (args.data is not None):
        parser.error("--data and --rows data go together")
    return args


# ---- model and rows ----
def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model (fp32 weights) and tokenizer that both sides start from."""
    import torch
    import transformers

    if args.model is None:
        return random_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(args.model)


def random_model() -> tuple[Any, Any]:
    """SmolLM3's architecture with 7.0 M random parameters, and a tokenizer of 4,096 words."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 4096)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    torch.manual_seed(0)
    config = transformers.SmolLM3Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    return transformers.SmolLM3ForCausalLM(config), tokenizer


def load_rows(args: argparse.Namespace, tokenizer: Any) -> Any:
    """A tokenised data set, the same for both sides. Random rows train on every token, which favours plain
    TRL.
    """
    import datasets
    import torch

    if args.rows == "data":
        return tokenised(args.data, tokenizer)
    generator = torch.Generator().manual_seed(0)
    count = 2000 if args.rows == "short" else 500
    normal = torch.randn(count, generator=generator)
    if args.rows == "short":  # lognormal, mean 87
        lengths = (normal * 0.7 + torch.tensor(87.0).log() - 0.7**2 / 2).exp().clamp(8, 1024)
    elif args.rows == "mixed":  # lognormal up to 1,024
        lengths = (normal * 0.9 + torch.tensor(300.0).log() - 0.9**2 / 2).exp().clamp(16, 1024)
    else:
        lengths = torch.full((count,), 1024.0)
    ids = [torch.randint(2, 4096, (int(n),), generator=generator).tolist() for n in lengths]
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": ids})


def tokenised(data: Path, tokenizer: Any) -> Any:
    """The rows of ``data`` as podtune trains on them, at most 1,024 tokens long."""
    from podtune.sft.data import tokenise
    from podtune.sft.data.source import DataSource
    from podtune.sft.data.tokenizer import TokenizeOptions

    source = DataSource(str(data))
    return tokenise.tokenised(source, tokenizer, TokenizeOptions(max_length=1024)).dataset


# ---- the two sides ----
def plain_trl(model: Any, tokenizer: Any, rows: Any, common: dict[str, Any], peft_config: Any = None) -> Any:
    """What a user writes."""
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model,
        args=SFTConfig(**common),
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def podtune(
    model: Any,
    tokenizer: Any,
    rows: Any,
    common: dict[str, Any],
    world: Any,
    peft_config: Any = None,
    *,
    heap: bool = True,
) -> Any:
    """What ``podtune.training`` sets up; ``heap`` False leaves the C library's heap alone."""
    from podtune.sft.config.keys import Settings
    from podtune.sft.config.resolve import resolve
    from podtune.sft.cpu.heap_trim import HeapTrimCallback
    from podtune.sft.train.meter import Meter
    from podtune.sft.train.saving import CheckpointWriter
    from podtune.sft.train.stop import CoordinatedStop, StopSignals
    from podtune.sft.train.trainer import PodtuneTrainer

    arguments = resolve(
        Settings({"dataset_name": "rows"} | common, dict.fromkeys(common, "sft_vs_trl")), world
    )
    model.set_attn_implementation(arguments.model.attn_implementation)
    writer = CheckpointWriter(Path(arguments.training.output_dir), world)
    return PodtuneTrainer(
        model=model,
        args=arguments.training,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=[HeapTrimCallback()] if heap else [],
        world=world,
        meter=Meter(world, arguments.strategy),
        writer=writer,
        stop=CoordinatedStop(StopSignals(), world, writer),
        resume_key=arguments.resume_key(""),
    )


def run(
    side: str,
    args: argparse.Namespace,
    world: Any,
    model: Any,
    tokenizer: Any,
    rows: Any,
    scratch: str,
    *,
    steps: int,
    seed: int,
    fp32: bool = False,
) -> Outcome:
    """Train a copy of ``model`` on one side for ``steps`` steps after warm-up (none in fp32, where every step
    is compared).
    """
    import copy

    import peft
    import torch
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()  # the precision of the side before; the process group stays
    warmup = 0 if fp32 else WARMUP
    common = {
        "output_dir": f"{scratch}/{side}",
        "per_device_train_batch_size": args.batch,
        "max_steps": warmup + steps,
        "seed": seed,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": min(10, warmup + steps),
    }
    if fp32:
        common |= {"bf16": False, "logging_steps": 1}
    mine = copy.deepcopy(model)
    torch.manual_seed(0)  # the adapters' first weights
    adapter = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if args.lora else None
    trainer = (
        plain_trl(mine, tokenizer, rows, common, adapter)
        if side == "trl"
        else podtune(mine, tokenizer, rows, common, world, adapter)
    )
    seen = Seen(trainer.data_collator)
    trainer.data_collator = seen
    clock = stopwatch(warmup)
    trainer.add_callback(clock)
    quiet(trainer)
    trainer.train()
    tokens, digests = seen.by_step(steps, warmup, world)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    wall, cpu = clock.total(world)
    return Outcome(
        tokens, wall, cpu, [e["loss"] for e in history], [float(e["grad_norm"]) for e in history], digests
    )


class Seen:
    """A collator that notes the length and a digest of every row that passes through it."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.batches: list[list[tuple[int, str]]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        self.batches.append(
            [
                (len(r["input_ids"]), hashlib.sha1(json.dumps(r["input_ids"]).encode()).hexdigest())
                for r in rows
            ]
        )
        return self.collator(rows)

    def by_step(self, steps: int, warmup: int, world: Any) -> tuple[int, list[list[str]]]:
        """Real tokens of all ranks in the timed steps, and the rows of every step as a sorted list of
        digests.
        """
        everyone = [self.batches[: warmup + steps]]
        if world.world_size > 1:
            import torch.distributed as dist

            everyone = [None] * world.world_size  # type: ignore[list-item]
            dist.all_gather_object(everyone, self.batches[: warmup + steps])
        tokens = sum(length for rank in everyone for batch in rank[warmup:] for length, _ in batch)
        return tokens, [
            sorted(digest for batch in step for _, digest in batch) for step in zip(*everyone, strict=True)
        ]


def stopwatch(warmup: int) -> Any:
    """A callback that times the steps after ``warmup``."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == warmup:
                self.started = (time.perf_counter(), time.process_time())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.ended = (time.perf_counter(), time.process_time())

        def total(self, world: Any) -> tuple[float, float]:
            import torch
            import torch.distributed as dist

            wall, cpu = (
                torch.tensor(end - start, dtype=torch.float64)
                for start, end in zip(self.started, self.ended, strict=True)
            )
            if world.world_size > 1:
                dist.all_reduce(wall, dist.ReduceOp.MAX)
                dist.all_reduce(cpu)
            return float(wall), float(cpu)

    return Stopwatch()


def quiet(trainer: Any) -> None:
    from transformers import PrinterCallback

    trainer.remove_callback(PrinterCallback)


# ---- the result ----
def compare(outcomes: dict[str, Outcome]) -> dict[str, float]:
    """Largest relative difference of loss and of gradient norm over the logged steps; stops if the rows
    differ.
    """
    trl, ours = outcomes["trl"], outcomes["podtune"]
    if trl.steps != ours.steps:
        sys.exit("the two sides did not train on the same rows: no speed is worth reporting")

    def largest(a: list[float], b: list[float]) -> float:
        return max((abs(x - y) / max(abs(x), 1e-12) for x, y in zip(a, b, strict=True)), default=0.0)

    return {"loss": largest(trl.losses, ours.losses), "grad_norm": largest(trl.grad_norms, ours.grad_norms)}


def print_table(
    args: argparse.Namespace, differences: dict[str, float], timed: dict[str, list[Outcome]]
) -> None:
    def spread(values: list[float]) -> dict[str, float]:
        return {"median": statistics.median(values), "min": min(values), "max": max(values)}

    pairs = list(zip(timed["trl"], timed["podtune"], strict=True))
    result: dict[str, Any] = {
        "rows": args.rows,
        "lora": args.lora,
        "processes": args.processes,
        "threads": args.threads,
        "batch": args.batch,
        "steps": args.steps,
        "repeats": args.repeats,
        "tokens_per_s": {side: spread([o.tokens / o.wall_s for o in timed[side]]) for side in SIDES},
        "tokens_per_cpu_s": {side: spread([o.tokens / o.cpu_s for o in timed[side]]) for side in SIDES},
        "ratio": spread([a.wall_s / b.wall_s for a, b in pairs]),
        "ratio_cpu": spread([a.cpu_s / b.cpu_s for a, b in pairs]),
        "loss": {side: statistics.mean(x for o in timed[side] for x in o.losses) for side in SIDES},
        "grad_norm": {side: statistics.mean(x for o in timed[side] for x in o.grad_norms) for side in SIDES},
        "fp32_relative_difference": differences,
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    print(
        f"{args.rows} rows{', LoRA' * args.lora}, {args.processes} process(es) x "
        f"{args.threads} thread(s), batch {args.batch}, {args.repeats} x {args.steps} steps"
    )
    print(f"{'':10}{'real tokens/s (min - max)':>32}{'per CPU-second':>32}{'loss':>9}{'grad norm':>11}")
    for side in SIDES:
        wall, cpu = result["tokens_per_s"][side], result["tokens_per_cpu_s"][side]
        print(
            f"{side:10}{_cell(wall, '.0f'):>32}{_cell(cpu, '.0f'):>32}"
            f"{result['loss'][side]:9.4f}{result['grad_norm'][side]:11.4f}"
        )
    print(f"{'ratio':10}{_cell(result['ratio'], '.2f'):>32}{_cell(result['ratio_cpu'], '.2f'):>32}")
    worst = max(differences.values())
    verdict = "equal" if worst <= TOLERANCE else "NOT EQUAL"
    print(
        f"fp32, 6 steps: loss differs by {differences['loss']:.1e}, gradient norm by "
        f"{differences['grad_norm']:.1e} (relative): {verdict}"
    )


def _cell(spread: dict[str, float], form: str) -> str:
    return f"{spread['median']:{form}} ({spread['min']:{form}} - {spread['max']:{form}})"


if __name__ == "__main__":
    raise SystemExit(main())
