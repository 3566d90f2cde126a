"""Data and models in object storage: fetched once and whole, whatever the network does. No secrets."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations
from support.object_store import ObjectStore

from podtune.commands.eval import _base
from podtune.pod import prepare
from podtune.run.errors import (
    CONFIG,
    NO_INPUT,
    NO_PERMISSION,
    UNAVAILABLE,
    ConfigError,
    Unavailable,
    UserError,
)
from podtune.sft.config import settings as config
from podtune.sft.data.load import load_split
from podtune.sft.data.source import DataSource, Sources, local_path
from podtune.sft.model.load import load_model
from podtune.sft.source import copies
from podtune.sft.source import object_store as store
from podtune.sft.source.model import base_of, locate_model

ROWS = "".join(json.dumps({"prompt": f"What is {n}?", "completion": f" {n}."}) + "\n" for n in range(64))


@pytest.fixture
def volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models volume; waits between attempts are short."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(store, "PAUSES_S", (0.0, 0.0, 0.0))
    return tmp_path


@pytest.fixture(scope="module")
def bucket(object_store: ObjectStore) -> str:
    url = object_store.bucket("inputs")
    put(f"{url}/rows.jsonl", ROWS)
    for name, content in {
        "config.json": "{}",
        "model.safetensors": "w" * 300_000,
        "pytorch_model.bin": "p",
        "sub/x.txt": "",
    }.items():
        put(f"{url}/models/m/{name}", content)
    return url


def put(url: str, content: str) -> None:
    with fsspec.open(url, "w") as file:
        file.write(content)


def test_a_file_is_fetched_once_and_again_when_it_has_changed(
    bucket: str, volume: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{bucket}/changing.jsonl"
    put(url, ROWS)
    first = copies.fetch(url)
    assert first.read_text() == ROWS
    assert first.name == "changing.jsonl"
    copies.fetch(url)
    assert capsys.readouterr().out.count("fetching") == 1
    put(url, ROWS.replace("What", "Who"))
    assert copies.local(url).read_text() == ROWS, "during a run it stays what it was"
    assert copies.fetch(url).read_text().startswith('{"prompt": "Who')


def test_rows_are_read_from_the_copy_under_their_own_name(bucket: str, volume: Path) -> None:
    sources = Sources.of({"dataset_name": f"{bucket}/rows.jsonl", "eval_strategy": "no"})
    sources.check()
    assert str(sources) == f"{bucket}/rows.jsonl"
    assert len(load_split(sources.train)) == 64


def test_a_model_is_a_folder_without_pickles(bucket: str, volume: Path) -> None:
    origin = locate_model(f"{bucket}/models/m")
    assert origin.files == ("config.json", "model.safetensors", "sub")
    assert local_path(f"{bucket}/models/m") == Path(origin.name)


def test_a_network_that_breaks_in_mid_transfer_loses_nothing(
    bucket: str, volume: Path, object_store: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    object_store.cut("GET", "model.safetensors")
    folder = copies.fetch(f"{bucket}/models/m")
    assert any("model.safetensors" in path for path in object_store.broken)
    assert (folder / "model.safetensors").stat().st_size == 300_000
    assert not list(volume.rglob("*.part"))


def test_a_broken_off_fetch_leaves_nothing_and_the_next_one_removes_what_a_kill_left(
    bucket: str, volume: Path, object_store: ObjectStore
) -> None:
    url = f"{bucket}/models/m"
    object_store.cut("GET", "model.safetensors", times=100)
    with pytest.raises(UserError) as caught:
        copies.fetch(url)
    object_store.mend()
    assert caught.value.code == UNAVAILABLE
    assert not list(volume.rglob("*config.json*"))
    entry = copies.copy_of(url).parent
    (killed := entry.with_name(f".{entry.name}.0.part")).mkdir()
    assert (copies.fetch(url) / "config.json").is_file()
    assert not killed.exists()


def test_links_that_others_planted_are_not_written_through(bucket: str, volume: Path) -> None:
    url = f"{bucket}/rows.jsonl"
    entry, victim = copies.copy_of(url).parent, volume / "victim.txt"
    victim.write_text("mine")
    for staged in (f".{entry.name}.{copies.version(url)[:12]}.part", f".{entry.name}.part"):
        (planted := entry.with_name(staged)).mkdir(parents=True)
        (planted / ".rows.jsonl.part").symlink_to(victim)
        (planted / "rows.jsonl").symlink_to(victim)
    assert not copies.fetch(url).is_symlink()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("url", ["http://host/..", "s3://bucket/a/../..", "https://host/.", "hf://"])
def test_the_name_of_a_copy_leads_nowhere_else(url: str, volume: Path) -> None:
    copy = copies.copy_of(url)
    assert copy.resolve() == copy
    assert copy.parent.parent == volume / "hf" / "podtune" / "store"


def test_a_url_that_an_adapter_or_a_record_names_is_never_fetched(
    bucket: str, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = f"{bucket}/models/m", list[str]()
    monkeypatch.setattr(store.Remote, "listing", lambda remote, below="": asked.append(remote.url))
    (adapter := volume / "adapter").mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": url}))
    for read in (
        lambda: base_of(locate_model(adapter)),
        lambda: _base({"config": {"model_name_or_path": url}}, adapter),
    ):
        with pytest.raises(UserError, match="only where you write it yourself") as caught:
            read()
        assert f"podtune model info {url}" in caught.value.fix
    assert asked == []
    monkeypatch.undo()
    monkeypatch.setenv("HF_HOME", str(volume / "hf"))
    copy = copies.fetch(url)  # the user wrote it once: its copy is what the adapter means
    assert base_of(locate_model(adapter)) == locate_model(url)
    assert _base({"config": {"model_name_or_path": url}}, adapter).name == str(copy)


def test_an_adapter_of_weights_in_a_store_names_what_the_user_wrote(
    bucket: str, volume: Path, micro_model: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    url = f"{bucket}/models/micro"
    store.Remote(url).upload({path.name: path for path in micro_model.iterdir()})
    adapted = get_peft_model(load_model(locate_model(url)), LoraConfig(target_modules=["q_proj"]))
    adapted.save_pretrained(volume / "adapter")
    named = json.loads((volume / "adapter" / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == url
    load_model(locate_model(volume / "adapter"))


def test_of_several_processes_one_fetches(bucket: str, volume: Path) -> None:
    reads: list[str] = []
    original = store.Remote.download

    def counted(remote: store.Remote, *more: object) -> None:
        reads.append(remote.url)
        original(remote, *more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.Remote, "download", counted)
        threads = [threading.Thread(target=copies.fetch, args=(f"{bucket}/models/m",)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(reads) == 1
    assert copies.copy_of(f"{bucket}/models/m").is_dir()


def test_without_the_store_a_copy_is_used_and_its_absence_is_said(
    bucket: str, volume: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"{bucket}/rows.jsonl"
    copies.fetch(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    impatient = {"retries": {"max_attempts": 0}}
    unreachable = fsspec.get_filesystem_class("s3")(config_kwargs=impatient, skip_instance_cache=True)
    unreachable.retries = 1
    monkeypatch.setattr(store, "file_system", lambda protocol: unreachable)
    assert copies.fetch(url).read_text() == ROWS
    assert "the copy of" in capsys.readouterr().err
    with pytest.raises(UserError) as caught:
        copies.fetch(f"{bucket}/other.jsonl")
    assert caught.value.code == UNAVAILABLE


def test_what_is_not_there_is_named(bucket: str, volume: Path) -> None:
    for url in (f"{bucket}/absent.jsonl", "s3://no-such-bucket-here/rows.jsonl"):
        with pytest.raises(UserError, match="no such object") as caught:
            copies.fetch(url)
        assert (caught.value.where, caught.value.code) == (url, NO_INPUT)
    with pytest.raises(UserError, match="cannot be written") as caught:
        store.check_writable("s3://no-such-bucket-here/runs")
    store.check_writable(f"{bucket}/runs")
    assert store.PROBE not in store.Remote(f"{bucket}/runs").listing()


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/rows.jsonl",
        "https://host/rows.jsonl?X-Amz-Signature=hunter2",
        "az://c/rows.jsonl?sig=hunter2",
        "https://hunter2@host/rows.jsonl",
        "s3://AKIA:ab/hunter2@bucket",
        "https://host/rows.jsonl?code=hunter2",
        "https://host/rows.jsonl;token=hunter2",
        "https://host/rows.jsonl#token=hunter2",
        "HTTPS://hunter2@host/rows.jsonl",
    ],
)
@pytest.mark.parametrize("key", ["dataset_name", "publish"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str, key: str) -> None:
    given = {"dataset_name": "rows.jsonl", "model_name_or_path": "m", "output_dir": "out"} | {key: url}
    with pytest.raises(UserError, match="has a secret in it") as caught:
        config.read([word for name, value in given.items() for word in (f"--{name}", value)], {})
    assert caught.value.code == CONFIG
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UserError, match="has a secret in it"):  # also of a command without a configuration
        copies.fetch(url)


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:8000/rows.jsonl", "hf://datasets/me/set@main/rows.jsonl", "s3://b/a@b=c.jsonl"),
        *("abfss://container@account.dfs.core.windows.net/rows.jsonl", "file:///data/rows.jsonl"),
    ],
)
def test_a_port_a_revision_and_a_container_are_no_secrets(url: str) -> None:
    store.refuse_secret(url, "URL")


def test_a_missing_package_and_an_unknown_protocol_say_what_to_do(
    volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3", name="s3fs")

    store.file_system.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(fsspec, "get_filesystem_class", missing)
        with pytest.raises(UserError) as caught:
            Sources.of({"dataset_name": "s3://bucket/x.jsonl"}).check()
    assert caught.value.fix == "pip install 'podtune[s3]'"
    with pytest.raises(UserError, match="s4:// is not a storage that is read"):
        copies.fetch("s4://bucket/x.jsonl")


@pytest.mark.parametrize("protocol", sorted(known_implementations))
def test_every_protocol_of_fsspec_is_read_or_refused_in_a_sentence(protocol: str, volume: Path) -> None:
    store.file_system.cache_clear()
    if protocol in store.PACKAGES:
        with contextlib.suppress(Unavailable):  # its package is not installed here
            store.file_system(protocol)
    else:
        with pytest.raises(ConfigError):
            store.file_system(protocol)


def test_prepare_fetches_model_and_data_and_sees_that_they_changed(
    bucket: str, volume: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "_tokenise", lambda values: None)  # shown in test_prepare
    put(f"{bucket}/prepared.jsonl", ROWS)
    path = volume / "config.yaml"
    values = {"model_name_or_path": f"{bucket}/models/m", "dataset_name": f"{bucket}/prepared.jsonl"}
    path.write_text(json.dumps({"output_dir": str(volume / "out"), **values}))
    prepare.prepare(path)
    assert all(copies.copy_of(url).exists() for url in values.values())
    prepare.prepare(path)
    assert "nothing to do" in capsys.readouterr().out
    put(f"{bucket}/prepared.jsonl", ROWS * 2)
    prepare.prepare(path)
    assert copies.copy_of(values["dataset_name"]).read_text() == ROWS * 2


def test_a_web_address_a_folder_and_a_local_url_work_alike(
    bucket: str, volume: Path, object_store: ObjectStore
) -> None:
    web = f"{object_store.environment['AWS_ENDPOINT_URL']}/inputs/rows.jsonl"
    with pytest.raises(UserError, match="access is denied") as caught:
        copies.fetch(web)
    assert caught.value.code == NO_PERMISSION
    store.file_system("s3").chmod(f"{bucket}/rows.jsonl", "public-read")
    assert copies.fetch(web).read_text() == ROWS
    put(f"{bucket}/set/train.jsonl", ROWS)
    put(f"{bucket}/set/test.jsonl", ROWS)
    sources = Sources.of({"dataset_name": f"{bucket}/set", "eval_strategy": "steps"})
    sources.check()
    assert sources.evaluation is not None
    assert sources.evaluation.split == "test"
    (volume / "rows.jsonl").write_text(ROWS)
    assert DataSource(f"file://{volume}/rows.jsonl").path == volume / "rows.jsonl"
