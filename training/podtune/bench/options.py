"""The options of one benchmark case: command line, sweep keys and the documents' table come from here."""

# ruff: noqa: RUF009 - _option is dataclasses.field with our two keys

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeVar

from podtune.plan.models import BENCHMARK_MODELS
from podtune.plan.setup import PLANNED
from podtune.plan.shapes import Checkpointing

# a plan is of the mean stage; what its copies send is of the fullest, with the embedding
UNPLANNED = ("pipeline-1f1b+ddp",)
T = TypeVar("T")
Precision = Literal["fp32", "bf16", "fp16", "fp8"]


def _option(default: T, about: str, *, least: int | None = None) -> T:
    """A field with its line of help and, for a number, the smallest one that makes sense."""
    return field(default=default, metadata={"help": about, "least": least})


@dataclass(frozen=True)
class Options:
    """One case. None, or 0 for a count, is unset: the default is the model's or the strategy's."""

    model: str = field(metadata={"help": f"{', '.join(BENCHMARK_MODELS)} or hf:PATH"})
    strategy: str = field(metadata={"help": ", ".join((*PLANNED, *UNPLANNED))})
    layers: int = _option(0, "tinygpt: its layers, in place of the model's own", least=0)
    heads: int = _option(0, "tinygpt: attention heads", least=0)
    width: int = _option(0, "tinygpt: hidden size; resnet: channels of the first stage", least=0)
    context: int = _option(0, "tinygpt: longest row, in tokens", least=0)
    steps: int = _option(20, "timed steps of one repeat", least=1)
    warmup: int = _option(5, "steps before the clock, dropped", least=0)
    repeats: int = _option(3, "how often the timed steps are run", least=1)
    global_batch_size: int = _option(0, "rows of one step over all processes (default: the model's)", least=0)
    per_device_batch_size: int = _option(
        0, "rows of one step and process, in place of the global batch: weak scaling", least=0
    )
    sequence_length: int = _option(0, "tokens a row (default: the model's context)")
    micro_batches: int = _option(
        0, "pipelines: pieces that the global batch is cut into (default: 8, or what divides it)", least=0
    )
    accumulation: int = _option(1, "forward and backward passes to one optimizer step", least=1)
    precision: Precision = _option(
        "fp32", "fp32 weights and optimizer in every case; what the products run in"
    )
    activation_checkpointing: Checkpointing = _option("none", "what the backward pass computes again")
    compile: bool = _option(False, "torch.compile, block by block")
    optimizer: Literal["adamw", "sgd"] = _option("adamw", "sgd has momentum 0.9")
    fused_optimizer: bool | None = _option(None, "adamw (default: on)")
    learning_rate: float = _option(1e-3, "the same at every step, but for --lr-schedule")
    norm: Literal["group", "batch"] = _option(
        "group", "residual networks; with batch, parity is not defined once the batch is split"
    )
    pretrained: bool = _option(False, "hf: models, load the weights instead of random ones")
    gradient_as_bucket_view: bool | None = _option(None, "ddp (default: on)")
    gradient_compression: Literal["none", "fp16", "bf16", "powersgd"] = _option(
        "none", "ddp: what its all-reduces send, by torch's communication hooks"
    )
    offload_activations: bool = _option(False, "keep what the backward pass needs in the CPU's memory")
    prefetch: int | None = _option(None, "fsdp, hsdp: blocks gathered ahead (default: FSDP's own)", least=0)
    overlap: bool | None = _option(
        None, "zero2, zero3, zero3-offload: communicate during backward (default: on)"
    )
    shard_size: int = _option(
        0, "hsdp, hybrids: processes that share one copy of the weights (default: a node's)", least=0
    )
    data: str = _option(
        "synthetic",
        "synthetic, or of residual networks a folder of podtune data cifar10",
    )
    epochs: int = _option(
        0,
        "train after the measurement: passes over the rows, each with the accuracy on the test split",
        least=0,
    )
    epoch_steps: int = _option(0, "steps of an epoch (default: all rows)", least=0)
    lr_schedule: Literal["constant", "cosine"] = _option("constant", "of --epochs; cosine ends at 0")
    lr_warmup: int = _option(0, "steps of --epochs in which the learning rate rises to its value", least=0)
    save: str = _option("", "folder for the state of --epochs after each of them; the newest is kept")
    resume: bool = _option(False, "continue --epochs where --save has ended")
    seed: int = _option(0, "of weights and rows")
    threads: int = _option(
        1, "CPU threads of a process (default: 1, so that a process stands for one device)", least=1
    )
    cpu: bool = _option(False, "leave GPUs alone")
    timeout_s: float = _option(300.0, "the bound of every collective and of a step")
    profile: bool = _option(False, "after the timing: trace, memory timeline, top operators")
    memory_snapshot: bool = _option(False, "CUDA: the allocator's history of one step")
    skip_parity: bool = _option(False, "do not compare losses first; the record says so")
    output: str = _option("benchmark", "folder of run.json and what --profile writes")
