"""``podtune prepare`` fills the volumes once for all pods, and says what it does, waits for, and misses."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from podtune.pod import prepare
from podtune.run import lock
from podtune.run.errors import UserError
from podtune.run.lock import hold
from podtune.run.record import now, write_json
from podtune.sft.data import cache


@pytest.fixture
def volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models volume with HF_HOME on it, and no network."""
    for name, value in {
        "HF_HOME": str(tmp_path / "models" / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "PODTUNE_POD_NAME": "run-master-0",
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def config_file(folder: Path, **values: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(json.dumps({"output_dir": str(folder / "out"), "max_steps": 1, **values}))
    return path


def rows(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"What is {n}?", "completion": f" The number {n}."}) + "\n"
            for n in range(64)
        )
    )
    return path


def markers(folder: Path) -> list[Path]:
    return sorted((folder / "models" / "huggingface" / prepare.MARKERS).glob("*.json"))


def test_tokens_are_made_once_and_a_restart_does_nothing(
    volumes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from podtune.sft.model.build import build_model

    data = rows(volumes)
    build_model("micro", data, volumes / "models" / "micro")
    config = config_file(
        volumes,
        model_name_or_path=str(volumes / "models" / "micro"),
        dataset_name=str(data),
        strategy="fsdp",
        bf16=True,
    )
    prepare.prepare(config)
    assert "64 rows" in capsys.readouterr().out
    assert list(cache.default_folder().glob("*/data.arrow"))
    assert len(markers(volumes)) == 1

    prepare.prepare(config)
    assert "nothing to do" in capsys.readouterr().out

    prepare.prepare(config, ["--max_length", "8"])
    assert len(markers(volumes)) == 2, "other tokens have a marker of their own"


def test_the_other_pods_wait_for_the_one_that_works_and_say_for_what(
    volumes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = volumes / "models" / "m"
    model.mkdir(parents=True)
    config = config_file(volumes, model_name_or_path=str(model), dataset_name=str(rows(volumes)))
    monkeypatch.setattr(lock, "SAY_EVERY_S", 0.0)
    said, finished = threading.Event(), threading.Event()
    monkeypatch.setattr(
        "builtins.print",
        lambda text, **_: said.set() if "waiting for process" in text else None,
    )

    def worker() -> None:
        prepare.prepare(config)
        finished.set()

    settings = prepare.config.read(["--config", str(config)])
    values = {key: value for key, value in settings.values.items() if prepare.decides_tokens(key)}
    marker = cache.default_folder().parents[1] / prepare.MARKERS / f"{prepare.key(values, '')}.json"
    marker.parent.mkdir(parents=True)
    with hold(marker.with_suffix(".lock"), until=lambda: False, wait_s=1, what="preparing"):
        thread = threading.Thread(target=worker, daemon=True)
        thread.start()
        assert said.wait(20)
        assert not finished.is_set()
        write_json(marker, {"at": now()})
        assert finished.wait(20)


def test_waiting_has_a_bound_that_names_the_holder(volumes: Path) -> None:
    model = volumes / "m"
    model.mkdir()
    config = config_file(volumes, model_name_or_path=str(model), dataset_name=str(rows(volumes)))
    values = {
        key: value
        for key, value in prepare.config.read(["--config", str(config)]).values.items()
        if prepare.decides_tokens(key)
    }
    file = cache.default_folder().parents[1] / prepare.MARKERS / f"{prepare.key(values, '')}.lock"
    file.parent.mkdir(parents=True)
    with (
        hold(file, until=lambda: False, wait_s=1, what="preparing"),
        pytest.raises(UserError, match="process"),
    ):
        prepare.prepare(config, timeout_s=0.2)


@pytest.mark.parametrize(
    ("values", "build", "says"),
    [
        ({"model_name_or_path": "org/model", "dataset_name": "/data/qa"}, "tiny", "not both paths"),
        ({"model_name_or_path": "/models/m", "dataset_name": "/data/qa"}, "small", "is 'small'"),
        ({"model_name_or_path": "/models/absent", "dataset_name": "/data/qa"}, "", "does not exist"),
        ({"model_name_or_path": "org/absent-model", "dataset_name": "/data/qa"}, "", "HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_prepared_is_named(
    volumes: Path, values: dict[str, str], build: str, says: str
) -> None:
    with pytest.raises(UserError) as caught:
        prepare.prepare(config_file(volumes, **values), build=build)
    assert says in str(caught.value)
    assert markers(volumes) == []


def test_a_volume_that_cannot_be_written_is_named_with_the_user(
    volumes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (volumes / "file").touch()
    monkeypatch.setenv("HF_HOME", str(volumes / "file" / "huggingface"))
    with pytest.raises(UserError, match="cannot be written by UID") as caught:
        prepare.prepare(config_file(volumes, model_name_or_path="/models/m", dataset_name="/data/qa"))
    assert caught.value.code == 73


def test_a_step_that_is_killed_again_and_again_is_given_up_with_the_likely_cause(volumes: Path) -> None:
    config = config_file(volumes, model_name_or_path="/models/absent", dataset_name="/data/qa")
    values = {
        name: value
        for name, value in prepare.config.read(["--config", str(config)]).values.items()
        if prepare.decides_tokens(name)
    }
    counter = cache.default_folder().parents[1] / prepare.MARKERS / f"{prepare.key(values, 'tiny')}.killed"
    counter.parent.mkdir(parents=True)
    counter.write_text(f"{prepare.MOST_KILLS}\n")  # what as many killed attempts leave
    with pytest.raises(UserError, match="out of memory"):
        prepare.prepare(config, build="tiny")
    assert not counter.exists(), "the next start counts again"
