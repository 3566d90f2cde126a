"""What is generated from the chart is what the chart gives today, whichever engine renders it."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from support.chart import render

from podtune.cluster.chart.render import CHART

ROOT = CHART.parents[1]
PROFILES = sorted(path.stem for path in (ROOT / "deploy" / "values").glob("*.yaml"))


@pytest.fixture(scope="module")
def chart_docs():
    spec = importlib.util.spec_from_file_location("chart_docs", ROOT / "scripts" / "chart_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("profile", ["single-gpu", "two-node", "cpu-smoke"])
def test_the_manifests_for_people_without_helm_are_those_of_today(chart_docs, profile):
    assert (ROOT / "deploy" / "rendered" / f"{profile}.yaml").read_text() == chart_docs.rendered(profile), (
        "run scripts/chart_docs.py"
    )


def test_the_charts_table_of_values_is_that_of_today(chart_docs):
    assert (CHART / "README.md").read_text() == chart_docs.readme(), "run scripts/chart_docs.py"


def test_the_charts_role_gives_the_rights_that_the_commands_need_today(chart_docs):
    assert chart_docs.USER_RULES.read_text() == chart_docs.user_rules(), "run scripts/chart_docs.py"


def test_every_value_is_documented(chart_docs):
    import yaml

    def leaves(values, prefix=""):
        for key, value in values.items():
            path = f"{prefix}{key}"
            yield from leaves(value, f"{path}.") if isinstance(value, dict) and value else [path]

    rows = [row.path for row in chart_docs.documented(CHART / "values.yaml")]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    missing = [
        leaf for leaf in leaves(values) if not any(leaf == row or leaf.startswith(f"{row}.") for row in rows)
    ]
    assert missing == []


@pytest.mark.skipif(not shutil.which("helm"), reason="helm is not on PATH")
@pytest.mark.parametrize("profile", ["two-node", "cpu-smoke", "elastic", "benchmark"])
def test_helm_and_the_engine_in_python_give_the_same_text(profile):
    files = [ROOT / "deploy" / "values" / f"{profile}.yaml"]
    sets = [] if profile in ("benchmark", "cpu-smoke") else ["aim.enabled=true", "aim.service.enabled=true"]
    assert render(files, sets, "run", engine="helm") == render(files, sets, "run", engine="python")


@pytest.mark.skipif(not shutil.which("helm"), reason="helm is not on PATH")
def test_helm_lint_finds_nothing():
    import subprocess

    done = subprocess.run(["helm", "lint", "--strict", str(CHART)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "WARNING" not in done.stdout


def test_documents_come_in_the_order_in_which_helm_creates_them(tmp_path: Path):
    text = render(
        [ROOT / "deploy" / "values" / "two-node.yaml"],
        ["aim.enabled=true", "aim.service.enabled=true"],
        "run",
        engine="python",
    )
    kinds = [line.removeprefix("kind: ") for line in text.splitlines() if line.startswith("kind: ")]
    assert list(dict.fromkeys(kinds)) == [
        "NetworkPolicy", "ServiceAccount", "ConfigMap", "PersistentVolumeClaim",
        "Service", "Deployment", "PyTorchJob", "Pod",
    ]  # fmt: skip
