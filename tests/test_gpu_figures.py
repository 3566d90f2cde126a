"""The figures of a GPU, rehearsed on a CPU: the first hour on a card is not lost to a misspelt flag."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from podtune.machine.facts import visible_gpus

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_figures.py"


def figures(*words: object, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu")
    figures("--rehearse", "--minutes", 60, "--out", folder)
    return folder


def test_every_measurement_leaves_its_figures(rehearsed: Path) -> None:
    found = {file.stem: json.loads(file.read_text()) for file in rehearsed.glob("*.json")}
    assert len(found) == 16
    for name, one in found.items():
        assert "error" not in one, one
        speed = "samples_per_s" if name.startswith("resnet") else "tokens_per_s"
        assert one["figures"][speed] > 0, name
        if one["part"] == 2:
            assert one["verdicts"] == {"parity": "as expected"}, name
        else:
            assert one["figures"]["peak_gib"] > 0, name
            assert one["verdicts"] == {"memory_error": "not measured"}, name  # of a GPU's memory
        assert not (rehearsed / "run").exists()
        assert not (rehearsed / "model").exists()
    shares = [found["lora-profile"]["figures"][f"{kind}_share"] for kind in ("product", "elementwise")]
    assert 0.1 < sum(shares) < 1


def test_a_kernel_counts_to_its_kind_by_its_name() -> None:
    spec = importlib.util.spec_from_file_location("gpu_figures", SCRIPT)
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where its dataclasses look for themselves
    spec.loader.exec_module(script)
    kernels = {
        "nvjet_tst_128x256_64x4_2x1_v_bz_TNT": 40,
        "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>": 20,
        "triton_poi_fused_mul_silu_0": 10,
        "void pytorch_flash::flash_fwd_kernel<...>": 10,
        "void at::native::multi_tensor_apply_kernel<...>": 20,
    }
    shares = {"attention_share": 0.1, "product_share": 0.4, "elementwise_share": 0.3}
    assert script.shares_of_kernels(kernels) == shares


def test_what_is_there_is_not_taken_again_and_the_minutes_are_kept(rehearsed: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in rehearsed.glob("*.json")}
    figures("--rehearse", "--out", rehearsed)
    assert {file: file.stat().st_mtime_ns for file in rehearsed.glob("*.json")} == before
    said = figures("--rehearse", "--part", 3, "--minutes", 0.1, "--out", tmp_path)
    assert said.count("left for another call") == 6
    assert not list(tmp_path.glob("*.json"))


def test_the_report_has_figure_expectation_and_verdict_side_by_side(rehearsed: Path) -> None:
    figures("--report", rehearsed)
    table = (rehearsed / "gpu.md").read_text()
    assert "| gpt2-zero3 | parity | 1 | losses of one process | as expected |" in table
    assert "| full-whole | memory_error | - | the plan within 15 % | not measured |" in table


@pytest.mark.skipif(bool(visible_gpus()), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    assert "there is no NVIDIA GPU here" in figures("--out", tmp_path, code=69)
