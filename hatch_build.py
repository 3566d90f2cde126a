"""Put the chart, the profiles and the commit that it is built from into a wheel.

They stand once in the repository (charts/, deploy/); an editable installation reads them where they are,
which is why this is no static ``force-include`` of pyproject.toml: that one would copy them there, too.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED = {"charts/podtune": "chart", "deploy/values": "values", "deploy/demo.yaml": "demo.yaml"}


class ShippedFiles(BuildHookInterface):  # type: ignore[type-arg]
    """Files of a wheel from outside the package."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for source, name in SHIPPED.items():
            build_data["force_include"][str(Path(self.root, source))] = f"podtune/shipped/{name}"
        if commit := os.environ.get("PODTUNE_GIT_SHA") or self._head():
            file = Path(tempfile.mkdtemp()) / "commit.txt"
            file.write_text(f"{commit}\n")
            build_data["force_include"][str(file)] = "podtune/commit.txt"

    def _head(self) -> str:
        if not Path(self.root, ".git").exists():
            return ""  # an image's build, or an unpacked source distribution
        command = ["git", "-C", self.root, "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
