"""podtune's own arguments of a fine-tune, beside TRL's. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

STRATEGIES = ("single", "ddp", "fsdp", "fsdp-grad-op", "hsdp", "zero2", "zero3")


@dataclass
class RunArguments:
    """What a run needs beyond TRL's ScriptArguments, SFTConfig, ModelConfig and DatasetMixtureConfig."""

    strategy: str = field(
        default="auto",
        metadata={
            "help": ("how the work is distributed: auto (single for one process, ddp for more) or ")
            + " ".join(STRATEGIES)
        },
    )
    global_batch_size: int | None = field(
        default=None,
        metadata={
            "help": (
                "rows of one optimizer step over all processes; gradient_accumulation_steps is "
                "solved for the world"
            )
        },
    )
    eval_dataset_name: str | None = field(
        default=None,
        metadata={
            "help": (
                "file, folder or hub name to evaluate on; default: the eval, test or validation split found"
            )
        },
    )
    eval_split_size: float | None = field(
        default=None,
        metadata={
            "help": (
                "share (below 1) or number of rows held out of the training set when there is no eval split"
            )
        },
    )
    max_eval_rows: int | None = field(
        default=None, metadata={"help": ("evaluate on the first N rows of the eval split")}
    )
    answer_rows: int = field(
        default=0,
        metadata={
            "help": (
                "rows to answer with the base and the tuned model at the end: sample answers, "
                "exact match, perplexity"
            )
        },
    )
    answer_max_new_tokens: int = field(default=64, metadata={"help": "longest answer of those, in tokens"})
    auto_resume: bool = field(
        default=True,
        metadata={"help": ("continue from the newest complete checkpoint in output_dir, if there is one")},
    )
    allow_resume_change: bool = field(
        default=False,
        metadata={
            "help": (
                "resume although the world size, batch, schedule, data or model changed since the checkpoint"
            )
        },
    )
    aim_repo: str | None = field(
        default=None,
        metadata={"help": ("Aim repository (folder, or aim://host:port) to mirror the metrics to")},
    )
    timeout_s: float = field(
        default=600.0,
        metadata={"help": ("longest wait for another rank, in the rendezvous and in a collective")},
    )
    loss: str = field(
        default="lean",
        metadata={"help": ("lean (podtune's, the same value for less work) or trl (TRL's own)")},
    )
    tokenized_cache: str | None = field(
        default=None,
        metadata={"help": ("folder for tokenised data; default: the Hugging Face cache (HF_HOME)")},
    )
