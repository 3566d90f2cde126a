"""podtune from Python: what README and docs/python.md promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from run_folders import RunMaker

import podtune


def test_importing_podtune_loads_no_library_and_not_even_its_own_commands() -> None:
    loaded = "*(m for m in sys.modules if m.startswith(('podtune', 'yaml', 'torch')))"
    program = f"import podtune, sys; print({loaded})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["podtune"]


def test_every_promised_name_is_there_and_no_other_is_made_up() -> None:
    for name in podtune.__all__:
        assert callable(getattr(podtune, name)), name
    with pytest.raises(AttributeError, match="fine_tone"):
        _ = podtune.fine_tone


def test_a_fine_tune_from_a_mapping_gives_its_run(
    micro_model: Path, qa_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {
        "model_name_or_path": str(micro_model),
        "dataset_name": str(qa_data),
        "output_dir": str(tmp_path / "run"),
        "max_steps": 2,
        "max_length": 64,
        "save_strategy": "no",
    }
    run = podtune.fine_tune(settings, logging_steps=1)
    assert (run.status, run.measurements.steps) == ("ok", 2)
    assert len(run.curve("train", "loss")[0]) == 2
    assert "ok: 2 steps" in capsys.readouterr().out


def test_a_fine_tune_that_cannot_be_is_an_error_with_the_runs_own_words(tmp_path: Path) -> None:
    with pytest.raises(podtune.UserError, match="learning_rate") as failure:
        podtune.fine_tune({"learning_rat": 1, "output_dir": str(tmp_path / "run")}, quiet=True)
    assert failure.value.code == 78
    with pytest.raises(podtune.UserError, match="output_dir"):
        podtune.fine_tune({})
    with pytest.raises(podtune.UserError, match="cannot be read"):
        podtune.fine_tune(tmp_path / "absent.yaml")


def test_runs_are_loaded_and_compared(make_run: RunMaker) -> None:
    first, second = make_run("first"), make_run("second", learning_rate=1e-2)
    assert podtune.load(first).status == "ok"
    assert podtune.compare(first, podtune.load(second))["verdict"]["text"]
    with pytest.raises(podtune.UserError, match="two runs"):
        podtune.compare(first)


def test_a_shipped_profile_is_rendered_and_linted() -> None:
    manifests = podtune.render("two-node", sets=["distributed.nodes=3"], name="first")
    assert podtune.lint(manifests).jobs == ["PyTorchJob first"]
    assert podtune.lint(manifests.replace("Master:", "Chief:")).count("error")


def test_memory_is_planned() -> None:
    plan = podtune.plan_memory("tinygpt-124m", strategy="fsdp", world_size=8, hardware="H100")
    assert 0 < plan.total_gib < 80
    assert plan.fits
