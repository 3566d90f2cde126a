"""What leaves a run, and what may come back into one: cards, uploads, pickles of checkpoints."""

from __future__ import annotations

import os
import pickle
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.checkpoints import Bomb
from support.resume_keys import KEY
from transformers import MambaConfig

from podtune.run.errors import UserError
from podtune.run.library_environment import set_library_environment
from podtune.run.record import new_record
from podtune.run.world import World
from podtune.sft.config.arguments import ResumeOptions
from podtune.sft.train.meter import utilisation
from podtune.sft.train.publish import model_card, push_to_hub, write_final
from podtune.sft.train.resume import find_checkpoint


class Recorder:
    """A hub that writes down what it is given."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, Any]] = []

    def upload_folder(self, **more: Any) -> None:
        self.uploads.append(more)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: recorder)
    return recorder


ARGS: Any = SimpleNamespace(hub_token=None, hub_revision="v1")


def test_the_final_model_is_uploaded_without_a_file_that_a_link_leads_to(
    hub: Recorder, tmp_path: Path
) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "notes[1].txt").symlink_to("/proc/self/environ")
    push_to_hub(ARGS, "me/model", tmp_path / "final")
    (upload,) = hub.uploads
    assert (upload["repo_id"], upload["revision"]) == ("me/model", "v1")
    assert upload["folder_path"] == str(tmp_path / "final")
    assert any(fnmatch("notes[1].txt", pattern) for pattern in upload["ignore_patterns"])


def test_an_upload_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: None)
    push_to_hub(ARGS, "me/model", tmp_path)
    assert "was not uploaded to me/model" in capsys.readouterr().err


def test_every_user_may_read_the_final_model(tmp_path: Path) -> None:
    def save(folder: str) -> None:
        Path(folder).mkdir(parents=True)
        (weights := Path(folder, "model.safetensors")).touch(0o600)  # as safetensors leaves it
        assert weights.stat().st_mode & 0o777 == 0o600

    write_final(tmp_path, save, "card")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "final").iterdir()}
    assert modes["model.safetensors"] == modes["README.md"]


def test_the_card_names_base_data_losses_and_command() -> None:
    record = new_record(
        mode="sft",
        name="run",
        config={"learning_rate": 1e-3, "lr_scheduler_type": "linear", "max_length": 128, "use_peft": True},
        strategy="ddp",
        model="HuggingFaceTB/SmolLM3-3B",
        world_size=2,
        nnodes=1,
        nproc_per_node=2,
        global_batch_size=16,
        seed=42,
        data={"path": "chats", "rows": 1234, "tokens": 5678, "fingerprint": "f" * 64},
        provenance={"command": ["podtune.training", "--output_dir", "my run"]},
    )
    record["measurements"] = {
        "answers": {"rows": 400, "base": {"exact_match": 0.0}, "tuned": {"exact_match": 0.905}},
        "steps": 7,
        "loss": {"first": 2.5, "last": 1.25, "eval_first": 3.0, "eval": 2.0},
    }
    card = model_card(record)
    assert 'base_model: "HuggingFaceTB/SmolLM3-3B"' in card
    assert "LoRA adapter for `HuggingFaceTB/SmolLM3-3B`" in card
    for words in (
        "1,234",
        "| training loss | 2.5000 over the first steps, 1.2500 over the last |",
        "| eval loss | 3.0000",
        "| held-out rows answered exactly | 0.0% by the base, 90.5% by this model, of 400 |",
        "16 rows a step, ddp on 2 processes",
        "podtune train -n 2 --output_dir 'my run'",
    ):
        assert words in card
    assert "None" not in card


def test_a_checkpoint_of_trls_is_taken_where_the_user_vouches_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / "checkpoint-3"
    theirs.mkdir()
    vouched = ResumeOptions(theirs, allow_change=True)
    with pytest.raises(UserError, match="there is no such folder"):
        find_checkpoint(tmp_path, KEY, ResumeOptions(tmp_path / "nothing", allow_change=True))
    (theirs / "trainer_state.json").write_text('{"global_step": 3}')
    with pytest.raises(UserError, match="one that TRL wrote is taken with --allow_resume_change"):
        find_checkpoint(tmp_path, KEY, ResumeOptions(theirs))
    resume = find_checkpoint(tmp_path, KEY, vouched)
    assert resume is not None
    assert (resume.step, resume.facts) == (3, {})
    assert "has no manifest" in capsys.readouterr().err
    (theirs / "podtune-manifest.json").write_text("rot")  # ours, and damaged
    with pytest.raises(UserError, match="cannot be read"):
        find_checkpoint(tmp_path, KEY, vouched)


def test_nothing_in_a_checkpoint_is_run_whatever_a_library_asks_torch_for(tmp_path: Path) -> None:
    torch.save({"state": Bomb(tmp_path / "exploded")}, tmp_path / "optimizer.pt")
    before = dict(os.environ)
    try:
        set_library_environment(1)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "optimizer.pt", weights_only=False)
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert not (tmp_path / "exploded").exists()


def test_a_figure_that_cannot_be_computed_ends_no_run() -> None:
    model = SimpleNamespace(config=MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16))
    assert utilisation(model, World(), "fp32", tokens_per_s=10.0, mean_length=16) == (None, None)
