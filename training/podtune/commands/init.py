"""podtune init: a values file for my data, model and GPUs, with reasons, and what to type next."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import jinja2
import typer
import yaml

from podtune.plan.hardware import hardware_row
from podtune.plan.models import shape_of
from podtune.plan.plan import Plan, estimate
from podtune.plan.setup import TrainingSetup
from podtune.run.errors import UsageError, UserError, creating
from podtune.sft.config.settings import check_yaml
from podtune.sft.data.source import DataSource, check_source

BATCHES = (16, 8, 4, 2, 1)  # rows a GPU, the largest that fits
LORA_R = 32
TEMPLATE = Path(__file__).with_name("init.yaml.jinja")


def init(
    data: Annotated[str, typer.Option(help="File, folder or hub name of the rows.")],
    model: Annotated[str, typer.Option(help="Model folder or hub id.")],
    gpus: Annotated[int, typer.Option(min=0, help="GPUs a node; 0 trains on the CPU.")] = 1,
    nodes: Annotated[int, typer.Option(min=1, help="Pods of the job.")] = 1,
    hardware: Annotated[str, typer.Option(help="The GPU's name, such as L40S; then memory is planned.")] = "",
    max_length: Annotated[int, typer.Option(min=2, help="Longest row in tokens.")] = 1024,
    output: Annotated[Path, typer.Option(help="Values file to write.")] = Path("podtune.yaml"),
    force: Annotated[bool, typer.Option(help="Write over a file that is there.")] = False,
) -> None:
    """Write a values file for a fine-tune in a cluster, with the reason beside each choice.

    Looks at the data and plans the memory of the model on your GPUs; the commands that it names at its end
    check what it wrote.

    \b
    Examples:
      podtune init --data trl-lib/Capybara --model HuggingFaceTB/SmolLM3-3B --gpus 1 --nodes 2 --hardware L40S
      podtune init --data rows.csv --model Qwen/Qwen3-0.6B --output mine.yaml
    """
    if output.exists() and not force:
        raise UsageError("is there already", where=str(output), fix="--force, or another --output")
    rows = look_at(data)
    choice = choose(model, gpus, nodes, hardware, max_length)
    text = values(data, model, gpus, nodes, max_length, rows, choice)
    check_yaml(yaml.safe_load(text)["config"], "config of the values")  # as render and lint check it
    with creating(output, fix="another --output"):
        output.write_text(text, encoding="utf-8")
    print(f"{output}: {rows}; {choice.reason}")
    name = re.sub(r"[^a-z0-9]+", "-", output.stem.lower()).strip("-") or "run"
    print("\nnext:")
    print(f"  podtune dry-run -f {output} --model tiny --steps 20    # the job's pods as processes, here")
    print(f"  podtune submit -f {output} --name {name} --dry-run     # what the cluster says of it")
    print(f"  podtune submit -f {output} --name {name} --follow")


def look_at(data: str) -> str:
    """Describe the rows in words; a local file is checked as training would check it.

    Raises:
        UserError: the file is absent or holds no columns that can be trained.
    """
    if not Path(data).expanduser().exists():
        return f"rows of {data}, from the hub"
    if find_spec("pyarrow") is None:
        return f"rows of {data}, not looked at: pip install 'podtune[train]' could"
    check_source(DataSource(data))
    return f"rows of {data}, with columns that can be trained"


@dataclass(frozen=True)
class Choice:
    """A way to train a model on these GPUs; ``plan`` is None where its shape or the hardware is unknown."""

    strategy: str
    lora: bool
    batch: int
    reason: str
    plan: Plan | None = None


def choose(model: str, gpus: int, nodes: int, hardware: str, max_length: int) -> Choice:
    """The first that fits of: everything trained by ddp, by fsdp, LoRA by ddp, by fsdp; the largest batch.

    Raises:
        UserError: none fits, or the hardware is unknown.
    """
    ranks = max(1, gpus) * nodes
    simple = "single" if ranks == 1 else "ddp"
    if not gpus:
        return Choice(simple, False, 8, "no GPU: for a try, not for a model of size")
    if not hardware:
        return Choice(simple, True, 4, "LoRA, because without --hardware no memory was planned")
    row = hardware_row(hardware)
    try:
        shape = shape_of(model, max_length)
    except UserError:
        return Choice(simple, True, 4, f"LoRA, because the sizes of {model} are not known here")
    # what the fine-tune chooses there by itself: fp16 on a T4
    frozen, autocast = ("bf16", "bf16-autocast") if "bf16" in row.flops else ("fp16-mixed", "fp16-autocast")
    plan: Plan | None = None
    strategies = dict.fromkeys((simple, "fsdp" if ranks > 1 else simple))
    for lora, strategy, batch in itertools.product((False, True), strategies, BATCHES):
        setup = TrainingSetup(
            shape,
            strategy,
            ranks,
            precision=frozen if lora else autocast,
            batch_size=batch * ranks,
            nodes=nodes,
            activation_checkpointing="full",
            lora_r=LORA_R if lora else None,
        )
        plan = estimate(setup, row)
        if plan.fits:
            kind = "LoRA" if lora else "all weights"
            memory = f"{plan.total_gib:.0f} of {row.memory_gib:.0f} GiB a GPU by podtune bench plan"
            return Choice(strategy, lora, batch, f"{kind} by {strategy}: {memory}", plan)
    assert plan is not None
    raise UsageError(
        f"does not fit: even LoRA with one row needs {plan.total_gib:.0f} GiB a GPU",
        where=f"{model} on {ranks} x {row.name}",
        fix="more --gpus or --nodes, a smaller --max-length, or a smaller model",
    )


def values(data: str, model: str, gpus: int, nodes: int, max_length: int, rows: str, choice: Choice) -> str:
    local = Path(data).expanduser().exists()
    dataset = f"/data/{Path(data).name} # copy it onto the data claim: docs/how-to.md" if local else data
    if Path(model).expanduser().is_dir():
        model = f"/models/{Path(model).resolve().name} # copy the folder onto the models claim"
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    text: str = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        model=model,
        dataset=dataset,
        gpus=gpus,
        nodes=nodes,
        max_length=max_length,
        rows=rows,
        choice=choice,
        lora_r=LORA_R,
    )
    return text
