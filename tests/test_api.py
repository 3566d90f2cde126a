"""podtune from Python: what README and docs/python.md promise."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import RunMaker

import podtune

ROOT = Path(__file__).parents[1]


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


def test_the_notebook_runs_from_top_to_bottom(
    micro_model: Path,
    qa_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    (work / "data").symlink_to(qa_data)  # what its first cell makes; tests/test_docs.py reads that cell
    (work / "model").symlink_to(micro_model)
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] for cell in cells if cell["cell_type"] == "code")
    program = "\n".join(cell for cell in code if not cell.startswith("!"))
    for long, short in (("STEPS = 300", "STEPS = 3"), ('"answer_rows": 100', '"answer_rows": 4')):
        assert long in program
        program = program.replace(long, short)
    names: dict[str, Any] = {}
    exec(compile(program, "notebook.ipynb", "exec"), names)
    run, slower = names["run"], names["slower"]
    assert (run.status, run.measurements.steps) == ("ok", 3)
    assert [row["key"] for row in names["comparison"]["differences"]["config"]] == ["learning_rate"]
    assert slower.measurements.answers["rows"] == 4
    said = capsys.readouterr().out
    assert "ok: 3 steps" in said  # the run itself
    assert "step    3   eval loss" in said
    assert re.search(r"^exact match \d+\.\d% -> \d+\.\d% of 4$", said, re.MULTILINE), said[-3000:]


def test_a_fine_tune_that_cannot_be_is_an_error_with_the_runs_own_words(tmp_path: Path) -> None:
    with pytest.raises(podtune.UserError, match="learning_rate") as failure:
        podtune.fine_tune({"learning_rat": 1, "output_dir": str(tmp_path / "run")}, quiet=True)
    assert failure.value.code == 78
    with pytest.raises(podtune.UserError, match="output_dir"):
        podtune.fine_tune({})
    with pytest.raises(podtune.UserError, match="no such file"):
        podtune.fine_tune(tmp_path / "absent.yaml")


def test_runs_are_loaded_and_compared(make_run: RunMaker) -> None:
    first, second = make_run("first"), make_run("second", learning_rate=1e-2)
    assert podtune.load(first).status == "ok"
    (first / "loss.png").write_bytes(b"png")
    assert re.fullmatch(r"Run\(first, ok, 60 steps, eval loss \d\.\d{4}\)", repr(podtune.load(first)))
    assert 'src="data:image/png;base64,cG5n"' in podtune.load(first)._repr_html_()
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
