"""The chart rendered in this process, so that a test costs milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.chart import render

VALUES = Path(__file__).resolve().parents[2] / "deploy" / "values"

Documents = list[dict[str, Any]]


@pytest.fixture(scope="session")
def manifests() -> Callable[..., Documents]:
    """``manifests("two-node", "kueue", sets=["a.b=c"], name="run")``: the documents of these profiles
    together.
    """

    def rendered(*profiles: str, sets: list[str] | None = None, name: str = "run") -> Documents:
        files = [VALUES / f"{profile}.yaml" for profile in profiles]
        return list(yaml.safe_load_all(render(files, sets or [], name, engine="python")))

    return rendered


@pytest.fixture(scope="session")
def job(manifests: Callable[..., Documents]) -> Callable[..., dict[str, Any]]:
    """The PyTorchJob, TrainJob or Job among them."""

    def found(*profiles: str, sets: list[str] | None = None, name: str = "run") -> dict[str, Any]:
        return next(
            one
            for one in manifests(*profiles, sets=sets, name=name)
            if one["kind"] in ("PyTorchJob", "TrainJob", "Job")
        )

    return found
