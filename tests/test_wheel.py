"""A wheel is the whole product: in a fresh environment outside the checkout, every command is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
UV = Path(sys.prefix) / "bin" / "uv"
Podtune = Callable[..., str]


@pytest.fixture(scope="module")
def podtune(tmp_path_factory: pytest.TempPathFactory) -> Podtune:
    """The podtune of a wheel, run outside the checkout; the dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("training", "charts", "deploy"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    quiet: dict[str, Any] = {"check": True, "capture_output": True, "text": True, "timeout": 120}
    built = ["--wheel", "--no-build-isolation", "--offline", "--python", sys.executable]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PODTUNE_GIT_SHA": "1234567890abcdef"}
    subprocess.run([UV, "build", *built, "--out-dir", folder, source], env=environment, **quiet)
    del environment["PODTUNE_GIT_SHA"]
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], **quiet)
    python = folder / "venv" / "bin" / "python"
    (wheel,) = folder.glob("podtune-*.whl")
    subprocess.run([UV, "pip", "install", "--offline", "--no-deps", "--python", python, wheel], **quiet)
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], **quiet)
    (Path(site.stdout.strip()) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    elsewhere = folder / "elsewhere"
    (elsewhere / "training").mkdir(parents=True)
    (elsewhere / "training" / "__init__.py").touch()  # a user's folder of this name hides nothing

    def run(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [folder / "venv" / "bin" / "podtune", *words],
            cwd=elsewhere,
            env=environment | {"PATH": f"{folder}/venv/bin:{sys.prefix}/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    return run


def test_the_version_names_the_commit_that_the_wheel_was_built_from(podtune: Podtune) -> None:
    version = podtune("--version")
    assert version.startswith("podtune 0.1.0 (1234567, Python 3.")
    assert "torch 2." in version


def test_a_shipped_profile_is_rendered_by_its_name_and_lints_clean(podtune: Podtune, tmp_path: Path) -> None:
    manifests = podtune("render", "-f", "two-node", "--name", "first")
    assert "kind: PyTorchJob" in manifests
    (tmp_path / "job.yaml").write_text(manifests)
    assert "0 errors" in podtune("lint", str(tmp_path / "job.yaml"))


def test_an_unknown_profile_is_told_which_there_are(podtune: Podtune) -> None:
    assert "two-node" in podtune("render", "-f", "two-nodes", code=66)


def test_the_environment_of_the_pods_is_printed(podtune: Podtune) -> None:
    assert "PET_NNODES" in podtune("dry-run", "-f", "two-node", "--print-env")


def test_memory_is_planned_without_torch_and_the_fine_tune_is_there(podtune: Podtune) -> None:
    plan = ("bench", "plan", "--model", "tinygpt-124m", "--strategy", "fsdp", "--world-size", "8")
    assert "GiB" in podtune(*plan)
    assert "--processes" in podtune("train", "--help")


CORE = """
import sys
for name in ("torch", "transformers", "trl", "accelerate", "datasets", "peft", "numpy", "pandas", "pyarrow",
             "matplotlib", "pynvml", "aim", "deepspeed", "bitsandbytes", "kubernetes"):
    sys.modules[name] = None  # importing it raises ImportError
from podtune.cli import main
main()
"""


def core(*words: str) -> subprocess.CompletedProcess[str]:
    """Podtune where none of its extras is installed."""
    command = [sys.executable, "-c", CORE, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_the_core_alone_lints_renders_lists_and_compares(make_run: Any, tmp_path: Path) -> None:
    first, second = make_run("first"), make_run("second")
    page = str(tmp_path / "page.html")
    for words in (
        ("lint", "deploy/rendered/two-node.yaml"),
        ("render", "-f", "two-node"),
        ("runs", str(first.parent)),
        ("compare", str(first), str(second), "--html", page),
        ("bench", "plan", "--model", "tinygpt-124m", "--strategy", "ddp", "--world-size", "2"),
    ):
        done = core(*words)
        assert done.returncode == 0, f"{words}: {done.stderr[-800:]}"


def test_a_command_whose_extra_is_not_installed_names_it(tmp_path: Path) -> None:
    done = core("data", "build", "--output", str(tmp_path / "data"))
    assert done.returncode == 69
    assert "pyarrow is not installed" in done.stderr
    assert "podtune[train]" in done.stderr
    done = core("doctor", "--cluster")
    assert (done.returncode, "podtune[cluster]" in done.stderr) == (69, True)


def test_the_core_alone_writes_values_for_rows_that_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\na,b\n")
    made = tmp_path / "values.yaml"
    done = core("init", "--data", str(tmp_path / "rows.csv"), "--model", "org/model", "--output", str(made))
    assert done.returncode == 0, done.stderr
    assert "not looked at" in made.read_text()
