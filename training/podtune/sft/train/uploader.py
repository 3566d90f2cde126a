"""The copy of a run in object storage: complete checkpoints as it trains, final/ and the record at its end.

A checkpoint's manifest is uploaded last, so that half an upload is invisible. Where the pods share the
output volume rank 0 uploads all. Where each has a volume of its own, every pod uploads what its ranks
wrote, rank 0 adds the manifest over all of it, and a resume downloads the whole to every pod.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from podtune.run import checkpoint
from podtune.run.checkpoint import SAVING, Checkpoint
from podtune.run.errors import ConfigError, DataError, UserError, warn
from podtune.run.files import regular_files, replacing_folder, write_atomically
from podtune.run.manifest import MANIFEST, Damaged, Files, Manifest, flushed_files, read_manifest
from podtune.run.record import METRICS_FILE, RUN_FILE
from podtune.run.world import World
from podtune.sft.source.object_store import Entry, Remote
from podtune.sft.train.shared_volume import find_shared_volume

END_WAIT_S = 3600.0  # for the uploads, at the end
FAILED_WAIT_S = 30.0  # after an error: the other ranks are waiting for this one to end
PARTS_WAIT_S = 600.0  # for what the other pods upload of a checkpoint
LEAVING = ".uploading"  # a pod's own part of a checkpoint, until it is uploaded


class CheckpointUploader:
    """The uploads of a run to ``url``, and the way back. Every rank has one.

    Rank 0 uploads and, where the pods do not share the volume, the first rank of each other pod.

    Args:
        limit: checkpoints that rotation keeps there, None for all.

    Attributes:
        shared: all pods see the same output folder.
        uploads: this rank does.
        busy: the checkpoints that are uploading.
    """

    def __init__(self, url: str, output_dir: Path, world: World, limit: int | None) -> None:
        self.remote, self.output_dir, self.world, self.limit = Remote(url), output_dir, world, limit
        self.shared, self._token = find_shared_volume(output_dir, world)
        self.uploads = world.is_main or (not self.shared and world.local_rank == 0)
        self._running: threading.Thread | None = None
        self.busy: list[str] = []
        self._failed = ""

    # ---- downloads ----
    def newest(self, fits: Callable[[Checkpoint], object]) -> Checkpoint | None:
        """Download the newest complete checkpoint; None if there is none. Rank 0.

        Raises:
            UserError: it belongs to another run, says ``fits``; or the store cannot be read.
        """
        objects = self.remote.listing()
        for name in reversed(self.steps(objects)):
            try:
                manifest = self._manifest(name, objects)
                fits(Checkpoint(Path(name), manifest.step, manifest.facts))
                return self.download(name, objects)
            except Damaged as reason:
                warn(f"{self.remote.url}/{name} is not used: {reason}")
            except ConfigError as error:
                error.where = f"{self.remote.url}/{name}"
                error.fix = "undo the change, give the run another run_name, or say --allow_resume_change"
                raise
        return None

    def steps(self, objects: Mapping[str, Entry] | None = None) -> list[str]:
        """List the checkpoints there, or of a listing, oldest step first, complete or not."""
        names = {name.partition("/")[0] for name in (self.remote.listing() if objects is None else objects)}
        return sorted(filter(checkpoint.is_name, names), key=lambda name: int(name[11:]))

    def _manifest(self, name: str, objects: Mapping[str, Entry]) -> Manifest:
        if f"{name}/{MANIFEST}" not in objects:
            raise Damaged("it has no manifest: its upload was broken off")
        manifest = read_manifest(self.remote.read(f"{name}/{MANIFEST}") or b"", name)
        for file, (size, _) in manifest.files.items():
            if (entry := objects.get(f"{name}/{file}")) is None or entry.bytes != size:
                raise Damaged(f"{file} is missing, or not of {size} bytes")
        return manifest

    def download(self, name: str, objects: Mapping[str, Entry] | None = None) -> Checkpoint:
        """Download the checkpoint ``name`` to this pod's volume, and the record that it continues.

        Raises:
            Damaged: what arrived is not what was uploaded.
        """
        target, parts = self.output_dir / name, self.output_dir / SAVING
        objects = self.remote.listing(name) if objects is None else objects
        manifest = self._manifest(name, objects)
        text = manifest.text()
        if not (target / MANIFEST).is_file() or (target / MANIFEST).read_text(encoding="utf-8") != text:
            print(f"fetching {self.remote.url}/{name}", flush=True)
            parts.mkdir(exist_ok=True)
            with replacing_folder(target, within=parts) as part:  # this pod's own part of it
                self.remote.download({file: objects[f"{name}/{file}"] for file in manifest.files}, part)
                write_atomically(part / MANIFEST, text)
                checkpoint.read(part)
        for file in (RUN_FILE, METRICS_FILE):
            wanted = self.world.is_main and not (self.output_dir / file).exists()
            if wanted and (record := self.remote.read(file)):
                write_atomically(self.output_dir / file, record.decode(errors="replace"))
        return checkpoint.read(target)

    def share(self, resume: Checkpoint | None, rows: str) -> Checkpoint | None:
        """Download the checkpoint that rank 0 found to every pod with a volume of its own. A collective call.

        Raises:
            UserError: on every rank, if one pod could not, or the pods have different ``rows``.
        """
        if self.shared:
            return resume
        import torch.distributed as dist

        problem: UserError | None = None
        if resume and self.uploads and not self.world.is_main:
            shutil.rmtree(self.output_dir / SAVING, ignore_errors=True)
            try:
                self.download(resume.path.name)
            except Damaged as reason:
                problem = DataError(str(reason), where=f"{self.remote.url}/{resume.path.name}")
            except UserError as error:
                problem = error
        answers: list[Any] = [None] * self.world.world_size
        dist.all_gather_object(answers, (problem, rows))
        if first := next((answer[0] for answer in answers if answer[0]), None):
            raise first
        if len({answer[1] for answer in answers}) > 1:
            raise DataError(
                "the pods have fetched different rows: the data changed in between",
                where="dataset_name",
                fix="start the pods again",
            )
        return resume and replace(resume, path=self.output_dir / resume.path.name)

    # ---- uploads ----
    def saved(self, name: str, staging_dir: Path, best: str = "", *, last: bool) -> None:
        """Upload a checkpoint in the background. A collective call.

        Rank 0 uploads the committed one, other pods what their ranks left in ``staging_dir``. While an
        earlier one is uploading this one is left out on all pods, unless it is the ``last``.
        """
        if self._any_is_busy() and not last:
            if self.world.is_main:
                warn(f"{name} is not published: an earlier one is still uploading")
            if self.uploads and not self.world.is_main:
                shutil.rmtree(staging_dir, ignore_errors=True)
            return
        if self.world.is_main:
            self._begin(name, lambda: self._upload_committed(name, best))
        elif self.uploads:
            part = self.output_dir / LEAVING / name
            shutil.rmtree(part, ignore_errors=True)
            staging_dir.mkdir(parents=True, exist_ok=True)
            part.parent.mkdir(parents=True, exist_ok=True)
            staging_dir.rename(part)
            self._begin(name, lambda: self._upload_part(name, part))

    def _any_is_busy(self) -> bool:
        busy = bool(self.busy)
        if self.shared:
            return busy
        import torch
        import torch.distributed as dist

        state = torch.tensor(int(busy))
        dist.all_reduce(state, op=dist.ReduceOp.MAX)
        return bool(state)

    def _begin(self, name: str, upload: Callable[[], None]) -> None:
        earlier = self._running
        self.busy.append(name)

        def work() -> None:
            if earlier is not None:
                earlier.join()
            try:
                upload()
                self._failed = ""
            except Exception as error:  # the run goes on: the checkpoint is on the volume
                self._failed = f"{name}: {error}"
                warn(f"{name} was not published: {error}")
            finally:
                self.busy.remove(name)

        self._running = threading.Thread(target=work, name="publish", daemon=True)
        self._running.start()

    def _upload_committed(self, name: str, best: str) -> None:
        content = (self.output_dir / name / MANIFEST).read_bytes()
        manifest = read_manifest(content, name)
        files = {f"{name}/{file}": self.output_dir / name / file for file in manifest.files}
        self.remote.remove([f"{name}/{MANIFEST}"])  # of the same step, by an earlier start
        self.remote.upload(files)
        if not self.shared:
            parts = [self._part(name, node) for node in range(1, self.world.nnodes)]
            merged = {file: entry for part in parts for file, entry in part.items()} | manifest.files
            content = replace(manifest, files=merged).text().encode()
        self.publish_record()
        self.remote.write(f"{name}/{MANIFEST}", content)
        self._rotate(best)

    def _part(self, name: str, node: int) -> Files:
        """Wait for the entries of what pod ``node`` uploads of a checkpoint."""
        end = time.monotonic() + PARTS_WAIT_S
        while (content := self.remote.read(f"{name}/.part-{node}-{self._token}.json")) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"pod {node} has not uploaded its part after {PARTS_WAIT_S:.0f} s")
            time.sleep(0.5)
        return {file: (size, hashed) for file, (size, hashed) in json.loads(content).items()}

    def _upload_part(self, name: str, folder: Path) -> None:
        entries = flushed_files(folder)
        self.remote.upload({f"{name}/{file}": folder / file for file in entries})
        part = f"{name}/.part-{self.world.node_rank}-{self._token}.json"
        self.remote.write(part, json.dumps(entries).encode())
        shutil.rmtree(folder, ignore_errors=True)

    def _rotate(self, best: str) -> None:
        """Delete what rotation deletes on the volume, and what broken uploads left."""
        objects = self.remote.listing()
        steps = self.steps(objects)
        whole = [name for name in steps if f"{name}/{MANIFEST}" in objects]
        broken = [name for name in steps[: steps.index(whole[-1])] if name not in whole] if whole else []
        for name in (*checkpoint.surplus(whole, self.limit, best), *broken):
            self.remote.remove([f"{name}/{MANIFEST}"])  # first: what is half deleted is invisible
            self.remote.remove(key for key in objects if key.startswith(f"{name}/"))

    def publish_record(self) -> None:
        """Upload run.json and metrics.jsonl as they are now, to the last whole line."""
        for file in (RUN_FILE, METRICS_FILE):
            with contextlib.suppress(FileNotFoundError):
                content = (self.output_dir / file).read_bytes()
                self.remote.write(file, content if file == RUN_FILE else content[: content.rfind(b"\n") + 1])

    def finish(self, wait_s: float = END_WAIT_S, *, final: bool = False) -> str:
        """Wait for the uploads and, if ``final``, upload the trained model; return what failed."""
        if self._running is not None:
            self._running.join(wait_s)
            if self._running.is_alive():
                self._failed = f"an upload is not done after {wait_s:.0f} s"
        if final and self.world.is_main:
            self._failed = self._tried(self._upload_final)
        return self._failed

    def _upload_final(self) -> None:
        folder = self.output_dir / "final"
        if folder.is_symlink():
            raise DataError("is a link, which may lead anywhere", where=str(folder), fix="remove it")
        files = {f"final/{name}": path for name, path in regular_files(folder).items()}
        earlier = self.remote.listing("final")
        self.remote.upload(files)
        self.remote.remove(name for name in earlier if name not in files)

    def close(self) -> str:
        """Upload the record as it ended, which says that all else is there; return what failed. Rank 0."""
        return self._tried(self.publish_record)

    def failed(self) -> None:
        """Let uploads arrive after an error, and upload the record of how the run ended."""
        problem = self.finish(FAILED_WAIT_S)
        problem = (self.close() if self.world.is_main else "") or problem
        if problem:
            warn(f"not all of the run is published: {problem}")

    def complete(self) -> str:
        """Upload what a finished run lacks; return what failed. Rank 0."""

        def upload() -> None:
            if self.remote.read(RUN_FILE) != (self.output_dir / RUN_FILE).read_bytes():
                self._upload_final()
                self.publish_record()

        return self._tried(upload)

    @staticmethod
    def _tried(upload: Callable[[], None]) -> str:
        try:
            upload()
        except Exception as error:  # whatever the network says, the model is saved
            return str(error)
        return ""
