"""What a wheel holds beside the Python files: the chart, the profiles and the commit it was built from.

They stand once in the repository (charts/, deploy/) and are copied into podtune/shipped/ of a wheel. An
editable installation reads them where they are.
"""

import os
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SHIPPED = {"charts/podtune": "chart", "deploy/values": "values", "deploy/demo.yaml": "demo.yaml"}


class BuildWithChart(build_py):
    """Copies :data:`SHIPPED`, as far as it is there: an image's build has the code alone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "podtune"
        for source, name in SHIPPED.items():
            target = package / "shipped" / name
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, target, dirs_exist_ok=True)
            elif (ROOT / source).is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / source, target)
        if commit := os.environ.get("PODTUNE_GIT_SHA") or _commit():
            (package / "commit.txt").write_text(commit + "\n")


def _commit() -> str:
    if not (ROOT / ".git").exists():
        return ""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


setup(cmdclass={"build_py": BuildWithChart})
