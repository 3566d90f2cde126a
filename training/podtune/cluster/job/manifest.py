"""Manifests as mappings, and what becomes of them: pods."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

EXIT_CODES = frozenset(range(1, 256))  # of a container that failed


def dig(content: Json | None, *keys: str) -> Json:
    """The mapping at ``keys`` below ``content``, an empty one where any of them is absent."""
    for key in keys:
        # null is absent to the API server
        content = (content or {}).get(key)
    return content or {}


def name_of(document: Json) -> str:
    """The object's name."""
    return str(document["metadata"]["name"])


@dataclass(frozen=True)
class Pod:
    """One pod as its controller would create it; ``spec`` is a PodSpec with everything injected."""

    name: str
    replica_type: str  # "master", "worker", "node" for a TrainJob, "index" for an Indexed Job
    index: int
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Json
    restart_policy: str  # Always, OnFailure, Never, or ExitCode where the exit code decides
    final: frozenset[int] = frozenset()  # exit codes after which the job fails; others start the pod again

    def environment(self, container: Json) -> dict[str, str]:
        """The container's literal variables as the kubelet sets them.

        Later entries win, ``$(NAME)`` is expanded. Entries with ``valueFrom`` are absent: what they hold is
        known only in the cluster.
        """
        environment: dict[str, str] = {}
        for entry in container.get("env") or []:
            if "valueFrom" not in entry:
                environment[entry["name"]] = expand(str(entry.get("value") or ""), environment)
        return environment

    @property
    def variables(self) -> dict[str, str]:
        """The literal variables of its containers together."""
        return {
            name: value
            for container in self.spec.get("containers") or []
            for name, value in self.environment(container).items()
        }


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand Kubernetes' ``$(NAME)`` of args, command and env.

    Unknown names stay as they are and ``$$`` is one dollar.
    """
    reference = r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)"
    return re.sub(reference, lambda match: "$" if match[0] == "$$" else env.get(match[1], match[0]), text)


def as_env(variables: Mapping[str, str]) -> list[Json]:
    """The ``env`` of a container."""
    return [{"name": name, "value": value} for name, value in variables.items()]
