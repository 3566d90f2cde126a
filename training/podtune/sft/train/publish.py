"""The outputs of a run: ``final/`` with its model card, and uploads of complete folders to the hub."""

from __future__ import annotations

import glob
import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate import PartialState

from podtune.run.checkpoint import SAVING
from podtune.run.errors import warn
from podtune.run.files import apply_umask
from podtune.run.manifest import MANIFEST
from podtune.run.record import Json, Losses, Measurements, mapping, number

# of a checkpoint, what only training reads
TRAINING_STATE = ("*.pt", "*.pth", "*.bin", "global_step*", "latest", "zero_to_fp32.py", "trainer_state.json")
# hub_strategy: what of each save goes to the hub, and where
EACH_SAVE = {"every_save": "", "checkpoint": "last-checkpoint", "all_checkpoints": "{name}"}


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
    processes = int(record["world_size"])
    base = str(record["model"])
    head = ["library_name: transformers", "pipeline_tag: text-generation", "tags: [podtune, sft]"]
    if not Path(base).exists() and "://" not in base:
        head.append(f"base_model: {json.dumps(base)}")
    lines = ["---", *head, "---", "", f"# {record['name']}", ""]
    how = "a LoRA adapter for" if config.get("use_peft") else "all parameters of"
    lines += [f"Supervised fine-tuning of {how} `{base}` with podtune.", "", "| | |", "|---|---|"]
    path = data["path"] if isinstance(data["path"], list) else [data["path"]]
    cells = {
        "data": ", ".join(f"`{name}`" for name in path),
        "rows": f"{data['rows']:,} ({data['tokens']:,} tokens, fingerprint {data['fingerprint'][:12]})"
        if "rows" in data
        else "streamed",
        "steps": f"{measured.steps:,}" if measured.steps is not None else None,
        "tokens seen": f"{measured.tokens:,}" if measured.tokens is not None else None,
        "batch": f"{record['global_batch_size']} rows a step, {record['strategy']} on {processes} "
        f"process{'es' * (processes != 1)}",
        "learning rate": f"{config['learning_rate']:g}, {config['lr_scheduler_type']}",
        "longest row": f"{config['max_length']} tokens",
        "seed": str(record["seed"]),
    }
    loss = measured.loss or Losses()
    if loss.first is not None and loss.last is not None:  # each is the mean of a logging window
        cells["training loss"] = f"{loss.first:.4f} over the first steps, {loss.last:.4f} over the last"
    if loss.eval_first is not None and loss.eval is not None:
        cells["eval loss"] = f"{loss.eval_first:.4f} at first, {loss.eval:.4f} at the end"
    base_right, right = (
        number(mapping((measured.answers or {}).get(which)).get("exact_match")) for which in ("base", "tuned")
    )
    if measured.answers and base_right is not None and right is not None:
        cells["held-out rows answered exactly"] = (
            f"{base_right:.1%} by the base, {right:.1%} by this model, of {measured.answers['rows']}"
        )
    lines += [f"| {name} | {cell} |" for name, cell in cells.items() if cell]
    command = record["provenance"].get("command")
    if command and command[0] == "podtune.training" and record.get("nnodes", 1) == 1:
        count = ["-n", str(processes)] if processes > 1 else []
        command = ["podtune", "train", *count, *command[1:]]
    if command:
        lines += ["", "```", shlex.join(map(str, command)), "```"]
    return "\n".join(lines) + "\n"


class Publisher:
    """Uploads to the hub, as ``push_to_hub`` and ``hub_strategy`` ask for. Rank 0.

    A failed upload is a warning: the model is on the volume.
    """

    def __init__(self, args: Any, repository: str | None) -> None:
        self.args, self.repository = args, repository
        self._running: Any = None

    def saved(self, checkpoint: Path) -> None:
        """Upload a complete checkpoint in the background, unless an earlier one is still on its way."""
        place = EACH_SAVE.get(str(getattr(self.args.hub_strategy, "value", self.args.hub_strategy)))
        if not self.args.push_to_hub or place is None:
            return
        if self._running is not None and not self._running.done():
            return
        ignored = () if place else TRAINING_STATE
        self._running = self._upload(checkpoint, place.format(name=checkpoint.name), ignored, background=True)

    def finished(self, final: Path) -> None:
        """Upload the servable model and wait for it."""
        if not self.args.push_to_hub:
            return
        if self._running is not None:
            error = self._running.exception()
            if error:
                warn(f"a checkpoint was not uploaded: {error}")
        self._upload(final, "", (), background=False)

    def _upload(self, folder: Path, place: str, ignored: tuple[str, ...], *, background: bool) -> Any:
        from transformers.trainer import hf_api

        links = [path for path in folder.rglob("*") if path.is_symlink()]  # they may lead anywhere
        try:
            return hf_api().upload_folder(
                repo_id=self.repository,
                folder_path=str(folder),
                path_in_repo=place or None,
                commit_message=f"podtune: {folder.name}",
                token=self.args.hub_token,
                revision=self.args.hub_revision,
                ignore_patterns=[
                    *ignored,
                    MANIFEST,
                    *(glob.escape(str(path.relative_to(folder))) for path in links),
                ],
                run_as_future=background,
            )
        except Exception as error:  # whatever the network says, the model is saved
            warn(f"{folder} was not uploaded to {self.repository}: {error}")
            return None
