"""A job's volumes as local folders: shared ones shared, private ones private, and container paths rewritten
to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podtune.cluster.job.pytorchjob import Pod, expand
from podtune.run.errors import DataError

Json = dict[str, Any]

# The processes use the machine's own; a folder on disk would be no shared memory.
KEPT = ("/dev/shm",)


@dataclass
class Sandbox:
    """The folder tree of one dry run.

    ``volumes/CLAIM`` is shared by all pods, ``pods/POD/VOLUME`` belongs to one pod and is empty when the pod
    starts. ``notes`` collects what could not be reproduced, for the person to read.
    """

    root: Path
    documents: list[Json]
    config_overrides: Json = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    # what the overrides really changed, by key of the YAML; None: removed
    changed: Json = field(default_factory=dict)

    def folder(self, pod: Pod) -> Path:
        """The pod's own folder, in which its processes start."""
        folder = self.root / "pods" / file_name(pod.name, "pod")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def mounts(self, pod: Pod, container: Json) -> dict[str, Path]:
        """Local folder by container path, for what the container mounts."""
        sources = {volume["name"]: volume for volume in pod.spec.get("volumes") or []}
        folders: dict[str, Path] = {}
        for mount in container.get("volumeMounts") or []:
            path, source = mount["mountPath"].rstrip("/"), sources.get(mount["name"])
            if path in KEPT or source is None:
                continue
            local = self._volume(pod, source)
            if mount.get("subPath"):
                for part in str(mount["subPath"]).split("/"):
                    local /= file_name(part, "subPath")
                local.mkdir(parents=True, exist_ok=True)
            folders[path] = local
        return folders

    def fill(self, pod: Pod) -> None:
        """Write the ConfigMaps that the pod mounts, with their paths rewritten, as a starting pod would find
        them.
        """
        containers = [*(pod.spec.get("initContainers") or []), *pod.spec["containers"]]
        paths = {
            path: local for container in containers for path, local in self.mounts(pod, container).items()
        }
        for volume in pod.spec.get("volumes") or []:
            name = (volume.get("configMap") or {}).get("name")
            if name is None:
                continue
            document = self.document("ConfigMap", name)
            for key, text in ((document or {}).get("data") or {}).items():
                (self._volume(pod, volume) / file_name(key, "key of a ConfigMap")).write_text(
                    self._kept_here(key, rewrite(self._shrunk(key, text), paths)), encoding="utf-8"
                )

    def document(self, kind: str, name: str) -> Json | None:
        """The document of that kind and name among the rendered ones."""
        for document in self.documents:
            if document.get("kind") == kind and (document.get("metadata") or {}).get("name") == name:
                return document
        return None

    def note(self, text: str) -> None:
        """Remember ``text`` once."""
        if text not in self.notes:
            self.notes.append(text)

    def _volume(self, pod: Pod, volume: Json) -> Path:
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            local = self.root / "volumes" / file_name(claim, "claim")
        else:
            local = self.folder(pod) / file_name(volume["name"], "volume")
            if "secret" in volume:
                self.note(
                    f"the Secret {volume['secret'].get('secretName')} is in the cluster only: its "
                    "volume is empty here"
                )
            elif "hostPath" in volume:
                self.note(
                    f"hostPath {volume['hostPath'].get('path')} is an empty folder here, of each pod its own"
                )
        local.mkdir(parents=True, exist_ok=True)
        return local

    def _kept_here(self, key: str, text: str) -> str:
        """A training YAML whose ``publish`` is a folder of this machine, the same for all pods."""
        if "publish" not in text or not key.endswith((".yaml", ".yml")):
            return text
        import yaml

        content = yaml.safe_load(text)
        if not isinstance(content, dict) or not content.get("publish"):
            return text
        self.changed["publish"] = content["publish"] = f"file://{self.root / 'published'}"
        return yaml.safe_dump(content, sort_keys=False)

    def _shrunk(self, key: str, text: str) -> str:
        """A YAML file of the ConfigMap with the overrides applied; other files as they are."""
        if not self.config_overrides or not key.endswith((".yaml", ".yml")):
            return text
        import yaml

        content = yaml.safe_load(text) or {}
        if not isinstance(content, dict):
            return text
        for name, value in self.config_overrides.items():
            if content.get(name) != value:
                self.changed[name] = value
            content[name] = value
        content = {name: value for name, value in content.items() if value is not None}
        return yaml.safe_dump(content, sort_keys=False)


def file_name(name: object, what: str) -> str:
    """``name`` of a manifest as one part of a path here; Kubernetes would refuse any other, too."""
    if not re.fullmatch(r"[-._a-zA-Z0-9]+", str(name)) or name in (".", ".."):
        raise DataError(
            f"{name!r} is no name of a {what}",
            where="manifest",
            fix="use letters, digits, dashes, dots and underscores",
        )
    return str(name)


def rewrite(text: str, paths: Mapping[str, Path]) -> str:
    """``text`` with each container path of ``paths`` replaced by its local folder; the longest path wins.

    A path counts where a path can begin: ``/data`` in ``--dataset=/data/qa`` and in ``/data``, not in
    ``/my/data`` or ``/database``.
    """
    if not paths:
        return text
    options = "|".join(re.escape(path) for path in sorted(paths, key=len, reverse=True))
    return re.sub(rf"(?<![\w./~-])({options})(?![\w.-])", lambda match: str(paths[match[1]]), text)


def environment(pod: Pod, container: Json, sandbox: Sandbox, namespace: str) -> dict[str, str]:
    """The container's variables, those from the pod's own fields and from rendered ConfigMaps included; paths
    not yet local.
    """
    env: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        name = (source.get("configMapRef") or {}).get("name")
        if name and (document := sandbox.document("ConfigMap", name)):
            env |= {
                f"{source.get('prefix', '')}{key}": str(value)
                for key, value in (document.get("data") or {}).items()
            }
        else:
            sandbox.note(
                f"envFrom {name or source.get('secretRef', {}).get('name')} is in the cluster only: "
                "its variables are absent here"
            )
    for entry in container.get("env") or []:
        if "valueFrom" not in entry:
            env[entry["name"]] = expand(str(entry.get("value") or ""), env)
        elif (value := _from_source(entry["valueFrom"], pod, container, sandbox, namespace)) is not None:
            env[entry["name"]] = value
        else:
            sandbox.note(
                f"{entry['name']} comes from {next(iter(entry['valueFrom']))} in the cluster and is "
                "absent here"
            )
    return env


def _from_source(source: Json, pod: Pod, container: Json, sandbox: Sandbox, namespace: str) -> str | None:
    if field_path := (source.get("fieldRef") or {}).get("fieldPath"):
        fields = {"metadata.name": pod.name, "metadata.namespace": namespace, "metadata.uid": pod.name}
        addresses = dict.fromkeys(("status.podIP", "status.hostIP", "status.podIPs"), "127.0.0.1")
        keyed = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", field_path)
        if keyed:
            return (pod.labels if keyed[1] == "labels" else pod.annotations).get(keyed[2], "")
        fields = {
            **fields,
            **addresses,
            "spec.nodeName": "localhost",
            "spec.serviceAccountName": pod.spec.get("serviceAccountName", "default"),
        }
        return fields.get(field_path)
    if reference := source.get("configMapKeyRef"):
        document = sandbox.document("ConfigMap", reference.get("name", ""))
        text = ((document or {}).get("data") or {}).get(reference.get("key"))
        return None if text is None else str(text)
    if reference := source.get("resourceFieldRef"):
        kind, _, resource = str(reference.get("resource")).partition(".")
        amount = ((container.get("resources") or {}).get(kind) or {}).get(resource)
        return None if amount is None else str(amount)
    return None
