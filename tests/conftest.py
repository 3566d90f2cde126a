"""What many tests share: a small real data set, a micro model, and a launcher of the real programs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import Launcher
from support.object_store import ObjectStore
from support.run_folders import make_run as make_run  # a fixture of many rooms

from podtune.machine.facts import visible_gpus

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in the background of a shell; programs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not visible_gpus():  # on a GPU it would win over the device that a case asks for
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("AIM_UI_TELEMETRY_ENABLED", "0")

#: files that take minutes: begun first, so that no process is left alone with one of them at the end
LONGEST = (
    "test_readme",
    "test_strategies",
    "test_gpu_figures",
    "test_faults",
    "test_sweep",
    "test_api",
    "test_gpu_path",
    "test_sft",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they were."""
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


@pytest.fixture(scope="session")
def qa_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.parquet (about 600 rows) and eval.parquet, made by ``podtune data build``'s own
    code.
    """
    from podtune.demo_data.build import build

    folder = tmp_path_factory.mktemp("qa")
    build(folder, rows=600)
    return folder


@pytest.fixture(scope="session")
def micro_model(tmp_path_factory: pytest.TempPathFactory, qa_data: Path) -> Path:
    """A model under one million parameters with its own tokenizer, made by ``podtune model build``'s own
    code.
    """
    from podtune.sft.model.build import build_model

    folder = tmp_path_factory.mktemp("model") / "micro"
    build_model("micro", qa_data, folder)
    return folder


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """The one server of the session."""
    found = Launcher(tmp_path_factory.mktemp("logs"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """The one S3 server of the session; its environment is that of the tests from here on."""
    server = ObjectStore()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    yield server
    server.close()
    for name, value in before.items():
        os.environ.pop(name)
        os.environ.update({name: value} if value is not None else {})
