"""The help of the training program, from the known keys. Needs no torch."""

from __future__ import annotations

from podtune.sft.config.keys import environment, known_keys


def help_text(*, everything: bool = False) -> str:
    """Write the ``--help`` of the program: our keys, or TRL's too."""
    ours = [(key, spec) for key, spec in known_keys().items() if spec["class"] == "RunArguments"]
    lines = [
        "usage: torchrun --nproc-per-node N -m podtune.training [--config FILE.yaml] [--key value ...]",
        "       python -m podtune.training ...                     (one process)",
        "",
        "Supervised fine-tuning of a causal language model through TRL's SFTTrainer. Defaults < environment "
        "< YAML < command line.",
        "",
        "needed:",
        "  --model_name_or_path NAME   a folder, URL or hub id, for example HuggingFaceTB/SmolLM3-3B",
        "  --dataset_name NAME         Parquet, JSONL or CSV file, a folder of them, a saved data set, URL, "
        "or a hub name",
        "  --output_dir DIR            checkpoints, metrics.jsonl, run.json and final/ go there; an "
        "interrupted run resumes",
        "",
        "podtune's own:",
        *(f"  --{key:<26}{spec['help']} [{spec['default']}]" for key, spec in ours),
        "",
        "environment: " + ", ".join(f"{name} ({key})" for name, key in environment().items()),
        "",
        "examples:",
        "  python -m podtune.training --model_name_or_path demo/model --dataset_name demo/data/train.parquet "
        "--output_dir out",
        "  torchrun --nproc-per-node 2 -m podtune.training --config sft.yaml --global_batch_size 32 "
        "--strategy fsdp",
        "",
    ]
    theirs = [(key, spec) for key, spec in known_keys().items() if spec["class"] != "RunArguments"]
    if everything:
        lines.append("TRL's keys (type, default):")
        for key, spec in theirs:
            choices = f"  {{{','.join(spec['choices'])}}}" if spec.get("choices") else ""
            lines.append(f"  --{key:<42}{spec['type']:<6} {spec['default']}{choices}")
    else:
        lines.append(
            f"TRL's {len(theirs)} keys are all taken (learning_rate, max_length, packing, use_peft, "
            "...): --help_all lists them."
        )
    return "\n".join(lines)
