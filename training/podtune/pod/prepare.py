"""The content of a job's volumes, fetched or made once for all pods: model, data, tokens, and a marker.

``podtune prepare`` runs it in the init container of every pod. One pod takes the lock and works; the others
print its name and its work. Where the marker of the same configuration lies, nothing is left to do: a restart
costs a tenth of a second. Imports torch only to tokenise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from podtune.run.errors import (
    ConfigError,
    NotFound,
    SoftwareError,
    Unavailable,
    near,
    warn,
)
from podtune.run.lock import hold
from podtune.run.output_volume import check_writable
from podtune.run.record import now, write_json
from podtune.sft.config import settings as config
from podtune.sft.config.keys import Settings, known_keys
from podtune.sft.data import cache, source
from podtune.sft.source import copies, hub, object_store

BUILDS = ("micro", "tiny")
MARKERS = ".podtune-prepared"
MOST_KILLS = 3
# Keys of SFTConfig that decide the tokens; the others may need a GPU or a world that this step does not have.
TOKEN_KEYS = (
    *("max_length", "truncation_mode", "completion_only_loss", "assistant_only_loss", "dataset_text_field"),
    *("dataset_num_proc", "eos_token", "pad_token", "chat_template_path", "trust_remote_code"),
    *("packing", "packing_strategy", "eval_packing", "shuffle_dataset", "seed", "dataset_kwargs"),
    *("eval_strategy", "eval_on_start", "do_eval", "eval_steps", "max_steps", "output_dir"),
)
TOKEN_CLASSES = ("ScriptArguments", "DatasetMixtureConfig", "RunArguments")
NOT_HERE = ("strategy", "global_batch_size", "aim_repo", "run_name")
MODEL_KEYS = ("model_name_or_path", "model_revision")


def prepare(
    config_file: Path, arguments: Sequence[str] = (), *, build: str = "", timeout_s: float = 3600.0
) -> None:
    """Fill the volumes for ``config_file``: build or download, tokenise, write the marker.

    ``arguments``: more of the command line that training will get, which wins over the file.
    ``build``: make a model of this size (and a question-answer set) where the configuration says they lie,
    instead of downloading. ``timeout_s``: the longest wait for another pod.

    Raises:
        UserError: a configuration that cannot be prepared, a hub that cannot be reached, a volume that cannot
            be written, or another pod that has not finished in time.
    """
    if build and build not in BUILDS:
        raise ConfigError(
            f"is {build!r}{near(build, BUILDS)}",
            where="PREPARE_BUILD (prepare.build)",
            fix="micro, tiny or empty",
        )
    settings = config.read(["--config", str(config_file), *arguments])
    values = {key: value for key, value in settings.values.items() if decides_tokens(key)}
    markers = cache.default_folder().parents[1] / MARKERS
    check_writable(markers)
    markers.mkdir(parents=True, exist_ok=True)
    versions = {url: copies.version(url) for url in _urls(values)}
    marker = markers / f"{key(values, build, versions)}.json"
    if marker.exists():
        print(
            f"podtune prepare: nothing to do, prepared at {json.loads(marker.read_text())['at']}",
            flush=True,
        )
        return
    lock = marker.with_suffix(".lock")
    with hold(lock, until=marker.exists, wait_s=timeout_s, what="preparing this data") as held:
        if held and not marker.exists():
            started = time.monotonic()
            steps = _steps(values, build)
            with _attempt(marker.with_suffix(".killed")):
                for what, step in steps:
                    print(f"podtune prepare: {what}", flush=True)
                    step()
            seconds, pod = time.monotonic() - started, os.environ.get("PODTUNE_POD_NAME")
            done = {"by": pod or socket.gethostname(), "steps": [what for what, _ in steps]}
            write_json(marker, {"at": now(), "seconds": round(seconds, 1), **done})
            print(f"podtune prepare: done in {seconds:.0f} s", flush=True)


@contextlib.contextmanager
def _attempt(counter: Path) -> Iterator[None]:
    """Count attempts that were killed, and give up after :data:`MOST_KILLS` in a row.

    The operator makes a pod whose init container was killed again without any limit.
    """
    killed = int(counter.read_text() or 0) if counter.exists() else 0
    if killed >= MOST_KILLS:
        counter.unlink()
        raise SoftwareError(
            f"was killed {killed} times before it could end, most likely out of memory",
            where="prepare",
            fix="raise prepare.resources.limits.memory",
        )
    counter.write_text(f"{killed + 1}\n")
    try:
        yield
    finally:
        counter.unlink()


def decides_tokens(key: str) -> bool:
    """True if ``key`` of the configuration decides what is fetched or tokenised."""
    return key in (*TOKEN_KEYS, *MODEL_KEYS) or (
        known_keys()[key]["class"] in TOKEN_CLASSES and key not in NOT_HERE
    )


def _urls(values: dict[str, Any]) -> list[str]:
    """The URLs of the configuration in object storage, that of the model first."""
    evaluated = values.get("eval_dataset_name")
    sets = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
    names = [
        values.get("model_name_or_path"),
        values.get("dataset_name"),
        *sets,
        *(entry.get("path") for entry in values.get("datasets") or ()),
    ]
    return [str(name) for name in dict.fromkeys(names) if object_store.is_url(name)]


def key(values: dict[str, Any], build: str, versions: Mapping[str, str] | None = None) -> str:
    """The marker's name: a hash of all that decides the volumes, ``versions`` of URLs included."""
    without = ("output_dir", "max_steps", "eval_steps")
    relevant = {key: value for key, value in values.items() if key not in without}
    parts = [relevant, build, *([versions] if versions else [])]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _steps(values: dict[str, Any], build: str) -> list[tuple[str, Callable[[], object]]]:
    """The work in its order, each step with the words that waiting pods print."""
    model, revision = str(values["model_name_or_path"]), values.get("model_revision")
    local = source.local_path(model)
    steps: list[tuple[str, Callable[[], object]]] = [
        (f"fetching {url}", functools.partial(copies.fetch, url)) for url in _urls(values)
    ]
    if build:
        data = source.local_path(str(values.get("dataset_name")))
        if local is None or data is None:
            raise ConfigError(
                f"model_name_or_path ({model}) and dataset_name ({values.get('dataset_name')}) are not both "
                "paths",
                where=f"prepare.build {build}",
                fix="name paths on the volumes, such as /models/podtune-tiny and /data/qa; or leave "
                "prepare.build empty",
            )
        if not data.exists():
            steps.append((f"making the question-answer set {data}", functools.partial(_make_data, data)))
        if not local.exists():
            make_model = functools.partial(_make_model, build, data, local)
            steps.append((f"making the {build} model {local}", make_model))
    elif local is None:
        steps.append((f"downloading {model}", lambda: _download(model, revision)))
    elif not object_store.is_url(model) and not local.exists():
        raise NotFound(
            "does not exist",
            where=f"model_name_or_path {model}",
            fix="put it on the models volume, or name a hub id",
        )
    steps.append((f"tokenising {values.get('dataset_name') or 'the mixture'}", lambda: _tokenise(values)))
    return steps


# in this process: each other one would import torch and transformers anew, seconds of a first start
def _make_data(folder: Path) -> None:
    from podtune.demo_data.build import build

    build(folder)


def _make_model(size: str, data: Path, folder: Path) -> None:
    from podtune.sft.model.build import build_model

    build_model(size, data, folder)


def _download(name: str, revision: str | None) -> None:
    """Download the model into HF_HOME, without pickled weights."""
    if hub.look_up(name, "model", revision) is None:  # it is in the cache
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot_download(name, revision=revision, ignore_patterns=list(hub.UNWANTED))
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0][:300]
        raise Unavailable(
            f"the download failed: {reason}", where=name, fix="start again: what has arrived is kept"
        ) from error


def _tokenise(values: dict[str, Any]) -> None:
    """Load the data and fill the cache of token rows, as training will."""
    from podtune.run.world import World
    from podtune.sft.config.resolve import resolve
    from podtune.sft.data.rows import token_rows
    from podtune.sft.source.model import locate_model, vocabulary_size

    given = {key: value for key, value in values.items() if value is not None}
    settings = Settings(given | {"use_cpu": True, "bf16": False})
    settings.sources.check()
    arguments = resolve(settings, World())
    origin = locate_model(arguments.model.model_name_or_path, arguments.model.model_revision)
    tokenizer = arguments.load_tokenizer(origin)
    vocabulary = vocabulary_size(origin, arguments.training.trust_remote_code)
    rows = token_rows(settings.sources, tokenizer, arguments.training, arguments.run, vocabulary=vocabulary)
    for warning in rows.warnings:
        warn(warning)
    counted = "streamed rows" if rows.count is None else f"{rows.count} rows, {rows.info.tokens} tokens"
    print(f"podtune prepare: {counted}", flush=True)
