"""The copy of a run in object storage: complete checkpoints as it trains, final/ and the record at its end.

A checkpoint's manifest is uploaded last, so that half an upload is invisible. Rank 0 uploads. Where each pod
has a volume of its own, a resume downloads the checkpoint to every pod.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from accelerate.utils import broadcast_object_list, gather_object

from podtune.run import checkpoint
from podtune.run.checkpoint import SAVING, Checkpoint
from podtune.run.errors import ConfigError, DataError, UserError, warn
from podtune.run.files import regular_files, replacing_folder, write_atomically
from podtune.run.manifest import MANIFEST, Damaged, Manifest, read_manifest
from podtune.run.record import METRICS_FILE, RUN_FILE
from podtune.run.world import World
from podtune.sft.source.object_store import Entry, Remote

END_WAIT_S = 3600.0  # for the uploads, at the end
SEEN_S = 5.0  # until a file on a shared volume is seen by all pods


class CheckpointUploader:
    """The uploads of a run to ``url``, which keeps ``limit`` checkpoints, and the way back. On every rank."""

    def __init__(self, url: str, output_dir: Path, world: World, limit: int | None) -> None:
        self.remote, self.output_dir, self.world, self.limit = Remote(url), output_dir, world, limit
        self.shared = find_shared_volume(output_dir, world)  # all pods see the same folder
        self._running: threading.Thread | None = None
        self.busy: list[str] = []  # the checkpoints that are uploading
        self._failed = ""

    # ---- downloads ----
    def newest(self, fits: Callable[[Checkpoint], object]) -> Checkpoint | None:
        """Download the newest complete checkpoint; None if there is none. Rank 0.

        Raises :class:`UserError` if it belongs to another run, says ``fits``, or the store cannot be read.
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
        names = {name.partition("/")[0] for name in objects or self.remote.listing()}
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

        Raises :class:`Damaged` if something else arrives than was uploaded.
        """
        target, parts = self.output_dir / name, self.output_dir / SAVING
        objects = objects or self.remote.listing(name)
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
        problem: UserError | None = None
        if resume and self.world.local_rank == 0 and not self.world.is_main:
            shutil.rmtree(self.output_dir / SAVING, ignore_errors=True)
            try:
                self.download(resume.path.name)
            except Damaged as reason:
                problem = DataError(str(reason), where=f"{self.remote.url}/{resume.path.name}")
            except UserError as error:
                problem = error
        problems, all_rows = zip(*gather_object([(problem, rows)]), strict=True)
        if first := next(filter(None, problems), None):
            raise first
        if len(set(all_rows)) > 1:
            raise DataError(
                "the pods have fetched different rows: the data changed in between",
                where="dataset_name",
                fix="start the pods again",
            )
        return resume and replace(resume, path=self.output_dir / resume.path.name)

    # ---- uploads ----
    def saved(self, name: str, best: str = "", *, last: bool) -> None:
        """Upload a committed checkpoint in the background. Rank 0.

        While an earlier one is uploading this one is left out, unless it is the ``last``.
        """
        if self.busy and not last:
            warn(f"{name} is not published: an earlier one is still uploading")
            return
        earlier = self._running
        self.busy.append(name)

        def work() -> None:
            if earlier is not None:
                earlier.join()
            try:
                self._upload(name, best)
                self._failed = ""
            except Exception as error:  # the run goes on: the checkpoint is on the volume
                self._failed = f"{name}: {error}"
                warn(f"{name} was not published: {error}")
            finally:
                self.busy.remove(name)

        # a daemon: a store that hangs must not keep the process from ending
        self._running = threading.Thread(target=work, name="publish", daemon=True)
        self._running.start()

    def _upload(self, name: str, best: str) -> None:
        content = (self.output_dir / name / MANIFEST).read_bytes()
        files = read_manifest(content, name).files
        self.remote.remove([f"{name}/{MANIFEST}"])  # of the same step, by an earlier start
        self.remote.upload({f"{name}/{file}": self.output_dir / name / file for file in files})
        self.publish_record()
        # the last of its files: without it the checkpoint is not there
        self.remote.write(f"{name}/{MANIFEST}", content)
        self._rotate(best)

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
                # the last line may be half written
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
        return self._tried(self.publish_record) or self._failed

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


def find_shared_volume(output_dir: Path, world: World) -> bool:
    """Find out if all pods see the same ``output_dir``, or have one each. A collective call.

    Every pod leaves a file there and looks for those of the others.
    """
    if world.nnodes == 1:
        return True
    (word,) = broadcast_object_list([secrets.token_hex(4)])
    signs = [output_dir / f".{word}.{node}.part" for node in range(world.nnodes)]
    if world.local_rank == 0:
        output_dir.mkdir(parents=True, exist_ok=True)
        signs[world.node_rank].touch()
    # one folder has one number on every pod; two folders may have the same
    numbers = set(gather_object([output_dir.stat().st_ino]))
    end = time.monotonic() + (SEEN_S if len(numbers) == 1 else 0.5)
    while not (complete := {*signs} <= {*output_dir.iterdir()}) and time.monotonic() < end:
        time.sleep(0.1)
    shared = all(gather_object([complete]))
    signs[world.node_rank].unlink(missing_ok=True)
    return shared
