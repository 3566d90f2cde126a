"""The chart's manifests from values files and expressions of --set."""

from __future__ import annotations

from pathlib import Path

from podtune.cluster.chart.render import Engine, merged_values, rendered


def render(
    files: list[Path], sets: list[str], name: str, namespace: str = "default", *, engine: Engine = "auto"
) -> str:
    return rendered(merged_values(files, sets), name, namespace, engine=engine)
