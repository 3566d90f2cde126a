"""A job as the rules see it: the same few questions for a PyTorchJob, a TrainJob, a Job and a runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from podtune.cluster.job import trainjob
from podtune.cluster.job.indexed_job import is_indexed
from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.job.pytorchjob import INJECTED
from podtune.cluster.job.trainjob import NODE
from podtune.cluster.lint import core
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.cluster.lint.documents import RUNTIMES, Document
from podtune.cluster.lint.targets import Target
from podtune.cluster.lint.templates import (
    JobContainer,
    PodTemplate,
    ancestor,
    job_template,
    pod_of,
    replica_templates,
    replicated_jobs,
    runtime_templates,
)

ELASTIC = re.compile("PET_(RDZV_.*|MAX_RESTARTS|STANDALONE)")
OF_TRAINER = ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE")


@dataclass
class LintContext:
    """The other documents that a job refers to."""

    runtimes: dict[tuple[str, str], Json] = field(default_factory=dict)  # (kind, name) -> cleaned content
    claims: dict[str, list[tuple[str, list[str]]]] = field(default_factory=dict)  # name -> namespace, modes
    configmaps: dict[str, Json] = field(default_factory=dict)  # name -> data
    selectors: list[Document] = field(default_factory=list)  # that select by the labels of old operators


@dataclass
class Job:
    """A PyTorchJob, a TrainJob, a Job or a runtime with the documents around it.

    ``content`` has no value of a wrong type.
    """

    document: Document
    content: Json
    context: LintContext = field(default_factory=LintContext)
    violations: list[Diagnostic] = field(default_factory=list)  # of the CRD, by the document as written
    target: Target = field(default_factory=Target)
    trainer: str = ""  # the version of Trainer whose CRD it was held against

    @property
    def kind(self) -> str:
        return self.document.kind

    @property
    def metadata(self) -> Json:
        return dig(self.content, "metadata")

    @property
    def name(self) -> str:
        """The name, or the shortest that generateName can become."""
        # Kubernetes cuts it to 58 characters and appends five
        generated = str(self.metadata.get("generateName") or "")
        return str(self.metadata.get("name") or (generated and generated[:58] + "x" * 5))

    @property
    def spec(self) -> Json:
        return dig(self.content, "spec")

    @cached_property
    def templates(self) -> list[PodTemplate]:
        """One for each replica type, the Master first; a TrainJob has one."""
        if self.kind in RUNTIMES:
            return list(runtime_templates(self.content))
        if self.kind == "Job":
            return [job_template(self.spec)]
        return [self._node()] if self.kind == "TrainJob" else list(replica_templates(self.spec))

    @property
    def own_templates(self) -> list[PodTemplate]:
        """The templates that stand in this document."""
        return [] if self.kind == "TrainJob" else self.templates

    def template(self, role: str) -> PodTemplate | None:
        """The template of a replica type."""
        return next((template for template in self.templates if template.role == role), None)

    def role_at(self, place: Place) -> str:
        """The role of the template that ``place`` is in, or ""."""
        inside = (each.role for each in self.templates if place[: len(each.path)] == each.path)
        return next(inside, "")

    @cached_property
    def collected(self) -> dict[str, list[Diagnostic]]:
        """Violations of the CRD, and the API server's refusals of the pods described here, by code."""
        found = list(self.violations)
        if self.kind == "TrainJob":
            trainer = dig(self.spec, "trainer")
            own: Json = {key: trainer[key] for key in ("env", "resourcesPerNode") if key in trainer}
            found += core.refusals(own, ("spec", "trainer"), "trainer")
        for template in self.own_templates:
            found += core.refusals(template.pod, template.pod_path, "spec")
        by_code: dict[str, list[Diagnostic]] = {}
        for one in found:
            by_code.setdefault(one.code, []).append(one)
        return by_code

    @property
    def pods(self) -> int:
        """The number of pods; for a TrainJob 0 where only the cluster knows."""
        return sum(template.replicas for template in self.templates)

    @property
    def processes_per_pod(self) -> int | None:
        """The number that is written for processes of one pod, or None."""
        value = self.spec.get("nprocPerNode", dig(self.spec, "trainer").get("numProcPerNode"))
        if self.kind == "Job" and (main := self.templates[0].main):
            value = main.literals.get("PET_NPROC_PER_NODE")
        text = str(value)
        return int(text) if text.isdigit() and len(text) < 7 else None

    @property
    def runtime(self) -> Json | None:
        """The runtime of a TrainJob, from the documents or built in; None if it is only in the cluster."""
        reference = dig(self.spec, "runtimeRef")
        key = (reference.get("kind") or "ClusterTrainingRuntime", str(reference.get("name")))
        known = trainjob.TORCH_DISTRIBUTED if key == ("ClusterTrainingRuntime", "torch-distributed") else None
        return self.context.runtimes.get(key, known)

    @property
    def by_torch(self) -> bool | None:
        """True if the operator gives the pods torchrun's variables; None where only the cluster knows."""
        if self.kind != "TrainJob":
            return self.kind != "Job"
        return None if self.runtime is None else "torch" in dig(self.runtime, "spec", "mlPolicy")

    @cached_property
    def torch_environment(self) -> dict[str, str] | None:
        """The variables that every pod gets, with their values; those that differ by pod have the value "?".

        None where only the cluster knows.
        """
        if self.kind == "TrainJob":
            if self.by_torch is not True or self.spec.get("trainer") is None:
                return None
            nodes = str(self.pods) if self.pods else "?"
            return {"PET_NNODES": nodes, "JOB_COMPLETION_INDEX": "?", **dict.fromkeys(OF_TRAINER, "?")}
        if self.kind == "Job":
            return {"JOB_COMPLETION_INDEX": "?"} if is_indexed(self.content) else {}
        elastic, master = "elasticPolicy" in self.spec, self.template("Master") is not None
        env = {name: "?" for name in INJECTED if (elastic if ELASTIC.match(name) else master)}
        env |= {"PYTHONUNBUFFERED": "1", "PET_NPROC_PER_NODE": str(self.spec.get("nprocPerNode") or "auto")}
        env |= {"PET_NNODES": "?" if elastic else str(self.pods)}
        return env | ({"WORLD_SIZE": str(self.pods * (self.processes_per_pod or 1))} if master else {})

    def mains(self) -> Iterator[tuple[PodTemplate, JobContainer]]:
        """Each template with its training container."""
        for template in self.templates:
            if template.main is not None:
                yield template, template.main

    @cached_property
    def containers(self) -> list[JobContainer]:
        """Every container and init container that this document holds."""
        return [
            container
            for template in self.templates
            for container in (*template.containers, *template.init_containers)
            if "runtimeRef" not in container.path
        ]

    def _node(self) -> PodTemplate:
        """A TrainJob's template: spec.trainer over the runtime's, where that is in the same file."""
        trainer, runtime = dig(self.spec, "trainer"), self.runtime
        steps = replicated_jobs(runtime or {})
        labelled = [each for each in steps if ancestor(each) == "trainer"]
        step = next(iter(labelled or [each for each in steps if each.get("name") == NODE]), {})
        containers = pod_of(step).get("containers") or []
        inherited: Json = next((each for each in containers if each.get("name") == NODE), {})
        if runtime is trainjob.TORCH_DISTRIBUTED:
            inherited = {}  # its command is no choice of this job's
        main = {**inherited, "name": NODE, "env": trainer.get("env") or []}
        main |= {field: trainer[key] for key, field in trainjob.HANDED_ON.items() if key in trainer}
        others = [
            JobContainer(each, ("spec", "runtimeRef")) for each in containers if each.get("name") != NODE
        ]
        nodes: Any = 0 if runtime is None else dig(runtime, "spec", "mlPolicy").get("numNodes") or 1
        return PodTemplate(
            role=NODE,
            replicas=int(trainer.get("numNodes", nodes)),
            template=dig(step, "template", "spec", "template"),
            path=("spec",),
            pod_path=("spec", "runtimeRef"),
            main_name=NODE,
            of_trainjob=[JobContainer(main, ("spec", "trainer")), *others],
        )
