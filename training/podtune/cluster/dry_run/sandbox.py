"""A job's volumes as local folders, and its paths and variables rewritten for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from podtune.cluster.job.manifest import Json, Pod, dig, expand


@dataclass
class Sandbox:
    """The folder tree of one dry run.

    ``volumes/CLAIM`` is shared by all pods; ``pods/POD/VOLUME`` belongs to one pod and is empty when the pod
    starts. ``config_overrides`` change every training YAML, where None removes a key. ``notes`` collects what
    is different here, for the person to read.
    """

    root: Path
    documents: list[Json]
    config_overrides: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def folder(self, pod: Pod) -> Path:
        """The pod's own folder, in which its processes start."""
        folder = self.root / "pods" / pod.name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def mounts(self, pod: Pod, container: Json) -> dict[str, Path]:
        """Local folder by container path, for what the container mounts."""
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes") or []}
        folders: dict[str, Path] = {}
        for mount in container.get("volumeMounts") or []:
            path = mount["mountPath"].rstrip("/")
            # shared memory is the machine's own; a folder on disk would be none
            if path == "/dev/shm" or mount["name"] not in volumes:
                continue
            local = self._volume(pod, volumes[mount["name"]])
            folders[path] = local / str(mount.get("subPath") or "")
            folders[path].mkdir(parents=True, exist_ok=True)
        return folders

    def fill(self, pod: Pod) -> None:
        """Write the ConfigMaps that the pod mounts, with local paths, as a starting pod would find them."""
        containers = [*(pod.spec.get("initContainers") or []), *pod.spec["containers"]]
        paths = {
            path: local for container in containers for path, local in self.mounts(pod, container).items()
        }
        for volume in pod.spec.get("volumes") or []:
            for key, text in self._config_map(volume.get("configMap")).items():
                file = self._volume(pod, volume) / key
                file.write_text(rewrite(self._adapted(key, text), paths), encoding="utf-8")

    def environment(self, pod: Pod, container: Json) -> dict[str, str]:
        """The container's variables, also those from the pod's fields and ConfigMaps; paths not yet local."""
        env: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            variables = self._config_map(source.get("configMapRef"))
            if not variables:
                self.note("variables of envFrom that are in the cluster only are absent here")
            env |= {f"{source.get('prefix', '')}{key}": str(value) for key, value in variables.items()}
        for entry in container.get("env") or []:
            source = entry.get("valueFrom")
            value = self._value_from(source, pod) if source else expand(str(entry.get("value") or ""), env)
            if value is None:
                kind = next(iter(source))
                self.note(f"{entry['name']} comes from {kind} in the cluster and is absent here")
            else:
                env[entry["name"]] = value
        return env

    def note(self, text: str) -> None:
        """Remember ``text`` once."""
        if text not in self.notes:
            self.notes.append(text)

    def _config_map(self, reference: Json | None) -> dict[str, str]:
        """The data of a ConfigMap among the documents; empty if it is not among them."""
        name = (reference or {}).get("name")
        maps = (document for document in self.documents if document.get("kind") == "ConfigMap")
        return next((dig(each, "data") for each in maps if dig(each, "metadata").get("name") == name), {})

    def _volume(self, pod: Pod, volume: Json) -> Path:
        if claim := volume.get("persistentVolumeClaim"):
            local = self.root / "volumes" / str(claim["claimName"])
        else:
            local = self.folder(pod) / volume["name"]
            if "secret" in volume or "hostPath" in volume:
                self.note(f"the volume {volume['name']} is in the cluster only: an empty folder here")
        local.mkdir(parents=True, exist_ok=True)
        return local

    def _adapted(self, key: str, text: str) -> str:
        """A training YAML with the overrides, publishing to a local folder; other files as they are."""
        content = yaml.safe_load(text) if key.endswith((".yaml", ".yml")) else None
        if not isinstance(content, dict):
            return text
        overrides = dict(self.config_overrides)
        if content.get("publish"):
            # nothing of a dry run may take the place of what a real run has published
            overrides["publish"] = f"file://{self.root / 'published'}"
        changes = {name: value for name, value in overrides.items() if content.get(name) != value}
        if not changes:
            return text
        said = (f"no {name}" if value is None else f"{name}: {value}" for name, value in changes.items())
        self.note(f"changed in the training YAML: {', '.join(said)}")
        content = {name: value for name, value in (content | changes).items() if value is not None}
        return yaml.safe_dump(content, sort_keys=False)

    def _value_from(self, source: Json, pod: Pod) -> str | None:
        """The value from the pod's own fields or a ConfigMap; None if only the cluster has it."""
        if reference := source.get("configMapKeyRef"):
            return self._config_map(reference).get(reference.get("key"))
        path = dig(source, "fieldRef").get("fieldPath", "")
        if keyed := re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path):
            return (pod.labels if keyed[1] == "labels" else pod.annotations).get(keyed[2], "")
        fields = {
            # of the uid it counts only that pods differ in it
            **dict.fromkeys(("metadata.name", "metadata.uid"), pod.name),
            **dict.fromkeys(("status.podIP", "status.hostIP", "status.podIPs"), "127.0.0.1"),
            "metadata.namespace": "default",
            "spec.nodeName": "localhost",
        }
        return fields.get(path)


def rewrite(text: str, paths: Mapping[str, Path]) -> str:
    """Replace each container path of ``paths`` in ``text`` by its local folder; the longest path wins.

    A path counts where a path can begin: ``/data`` in ``--dataset=/data/qa`` and in ``/data``, not in
    ``/my/data`` or ``/database``.
    """
    if not paths:
        return text
    options = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    return re.sub(rf"(?<![\w./~-])({options})(?![\w.-])", lambda match: str(paths[match[1]]), text)
