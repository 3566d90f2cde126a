"""The output of a run: ``final/`` with its model card, and its upload to the hub."""

from __future__ import annotations

import glob
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from accelerate import PartialState
from transformers import TrainingArguments

from podtune.run.checkpoint import SAVING
from podtune.run.errors import warn
from podtune.run.files import apply_umask
from podtune.run.record import Json, Losses, Measurements, mapping, number


def write_final(
    output_dir: Path, save_model: Callable[[str], None], card: str, files: Sequence[Path] = ()
) -> None:
    """Write the servable model to ``final/``: what ``save_model`` leaves, the card, and copies of ``files``.

    It is complete or not there. A collective call: sharded weights are gathered.
    """
    state, target = PartialState(), output_dir / "final"
    staging_dir = output_dir / SAVING / target.name
    if state.is_main_process:
        shutil.rmtree(staging_dir, ignore_errors=True)
    state.wait_for_everyone()
    save_model(str(staging_dir))
    if state.is_main_process:
        # a pickle, which nobody who serves the model should load
        (staging_dir / "training_args.bin").unlink(missing_ok=True)
        (staging_dir / "README.md").write_text(card, encoding="utf-8")
        for file in files:
            shutil.copy(file, staging_dir / file.name)
        apply_umask(staging_dir)
        shutil.rmtree(target, ignore_errors=True)
        staging_dir.rename(target)
        shutil.rmtree(staging_dir.parent, ignore_errors=True)
    state.wait_for_everyone()


def model_card(record: Json) -> str:
    """Write the README of a trained model, from the record of its run."""
    config, data, measured = record["config"], record["data"], Measurements.read(record)
    processes, base = int(record["world_size"]), str(record["model"])
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [podtune, sft]"]
    if not Path(base).exists() and "://" not in base:
        head.append(f"base_model: {json.dumps(base)}")
    how = "a LoRA adapter for" if config.get("use_peft") else "all parameters of"
    paths = data["path"] if isinstance(data["path"], list) else [data["path"]]
    over = f"{record['strategy']} on {processes} process{'es' * (processes != 1)}"
    cells = {
        "data": ", ".join(f"`{name}`" for name in paths),
        "rows": f"{data['rows']:,} ({data['tokens']:,} tokens, fingerprint {data['fingerprint'][:12]})"
        if "rows" in data
        else "streamed",
        "steps": f"{measured.steps or 0:,}",
        "tokens seen": f"{measured.tokens or 0:,}",
        "batch": f"{record['global_batch_size']} rows a step, {over}",
        "learning rate": f"{config['learning_rate']:g}, {config['lr_scheduler_type']}",
        "rows are cut at": f"{config['max_length']} tokens",
        "seed": str(record["seed"]),
    }
    loss = measured.loss or Losses()
    if loss.first is not None and loss.last is not None:  # each is the mean of a logging window
        cells["training loss"] = f"{loss.first:.4f} over the first steps, {loss.last:.4f} over the last"
    if loss.eval_first is not None and loss.eval is not None:
        cells["eval loss"] = f"{loss.eval_first:.4f} at first, {loss.eval:.4f} at the end"
    answers = measured.answers or {}
    base_right, right = (number(mapping(answers.get(each)).get("exact_match")) for each in ("base", "tuned"))
    if base_right is not None and right is not None:
        shares = f"{base_right:.1%} by the base, {right:.1%} by this model, of {answers['rows']}"
        cells["held-out rows answered exactly"] = shares
    lines = ["---", *head, "---", "", f"# {record['name']}", ""]
    lines += [f"Supervised fine-tuning of {how} `{base}` with podtune.", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {cell} |" for name, cell in cells.items()]
    command = record["provenance"].get("command")
    if command and command[0] == "podtune.training" and record.get("nnodes", 1) == 1:
        count = ["-n", str(processes)] if processes > 1 else []
        command = ["podtune", "train", *count, *command[1:]]
    if command:
        lines += ["", "```", shlex.join(map(str, command)), "```"]
    return "\n".join(lines) + "\n"


def push_to_hub(args: TrainingArguments, repository: str | None, final: Path) -> None:
    """Upload the servable model if ``push_to_hub`` asks for it. A failure is a warning: the volume has it."""
    from transformers.trainer import hf_api

    links = [path for path in final.rglob("*") if path.is_symlink()]  # they may lead anywhere
    try:
        hf_api().upload_folder(
            repo_id=repository,
            folder_path=str(final),
            commit_message=f"podtune: {final.name}",
            token=args.hub_token,
            revision=args.hub_revision,
            ignore_patterns=[glob.escape(str(path.relative_to(final))) for path in links],
        )
    except Exception as error:  # whatever the network says, the model is saved
        warn(f"{final} was not uploaded to {repository}: {error}")
