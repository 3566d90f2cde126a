"""PT4: what a pod relies on outside itself, and what it gives away."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.manifest import dig
from podtune.cluster.job.pytorchjob import CONTAINER, LABEL, PORT, PORT_NAME
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.cluster.lint.documents import JOBS
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import ALL, rule
from podtune.cluster.lint.schema import VARIABLE
from podtune.cluster.lint.templates import PodTemplate

SECRET_NAME = re.compile(
    r"(^|[_-])(TOKEN|SECRET|BEARER|CREDENTIALS|PAT|WEBHOOK(_?URL)?|NOTIFY_?URL|CONNECTION_?STRING"
    r"|(API|ACCESS|PRIVATE)?KEY)$|PASSW(OR)?D$",
    re.IGNORECASE,
)
NOT_SECRET = re.compile(
    r"^(EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE|NUM|MAX|MIN|IGNORE|USE|START|END)_?.*TOKEN$"
    r"|(^|_)(PUBLIC|CACHE|SORT|ROUTING|PARTITION|PRIMARY|IMAGE|LABEL|TEXT|CONFIG|STATE)_KEY$",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}"
    r"|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[\w-]{20,}|AIza[\w-]{35})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|\w+://[^/\s:@$]+:[^/\s:@$]+@"
    r"|\w+://[^\s$]*[?&;#](?i:[\w.-]*(sig|signature|token|secret|password|credential|key|code))=[^\s$]"
)
ISTIO = "sidecar.istio.io/inject"
OLD_LABELS = ("pytorch-job-name", "pytorch-replica-type", "pytorch-replica-index", "group-name")
HOST_DNS = "dnsPolicy: ClusterFirstWithHostNet"


@rule("PT401", "error", by="hang", fix="give each job a port of its own")
def host_network_port(job: Job) -> Iterator[Diagnostic]:
    """The workers hang waiting for the master's name with hostNetwork alone, as it does not resolve.

    dnsPolicy ClusterFirstWithHostNet makes it resolve. On the default port 23456 two jobs on one node clash
    (a warning).
    """
    for template in job.templates if job.pods > 1 else ():
        place = (*template.pod_path, "hostNetwork")
        if not template.pod.get("hostNetwork"):
            if template.pod.get("dnsPolicy") == "Default":
                message = "dnsPolicy of {role} is Default, the node's: Services do not resolve"
                at, fix = (*template.pod_path, "dnsPolicy"), "dnsPolicy: ClusterFirst, or leave it out"
                yield Diagnostic(at, message, "error" if _waits(job, template) else "warning", fix)
            continue
        if template.pod.get("dnsPolicy") not in ("ClusterFirstWithHostNet", "None"):
            message = f"hostNetwork of {{role}} without {HOST_DNS}: Services do not resolve"
            yield Diagnostic(place, message, "error" if _waits(job, template) else "warning", HOST_DNS)
        if _port(template) == PORT:
            yield Diagnostic(place, f"hostNetwork of {{role}} with the default port {PORT}", "warning")


def _waits(job: Job, template: PodTemplate) -> bool:
    """True for Workers, which the operator has wait for the master's name."""
    return template.role == "Worker" and job.template("Master") is not None


@rule("PT407", "error", by="operator", fix="name it, or leave it out")
def ports_without_a_service(job: Job) -> Iterator[Diagnostic]:
    """The operator cannot make a pod's Service of a port without a name, or of one number twice.

    It adds its own, pytorchjob-port 23456, to those of the container pytorch. Without Services no name of a
    pod resolves: the workers wait, and the job gets no status.
    """
    for _, container in job.mains():
        ports = container.spec.get("ports") or []
        named = any(port.get("name") == PORT_NAME for port in ports)
        seen = set() if named else {PORT}
        for index, port in enumerate(ports):
            place, number = (*container.path, "ports", index), port.get("containerPort")
            if not port.get("name") and (len(ports) > 1 or not named):
                yield Diagnostic(
                    place, f"the port {number} has no name, which a Service of several ports needs"
                )
            elif number in seen:
                also = f", as {PORT_NAME} that the operator adds" if number == PORT and not named else ""
                fix = f"name it {PORT_NAME}" if also else "keep one of them"
                yield Diagnostic(place, f"the port {number} is there twice{also}", fix=fix)
            seen.add(number)


def _port(template: PodTemplate) -> int:
    trainer = next((each for each in template.containers if each.name == CONTAINER), None)
    ports = trainer.spec.get("ports") or [] if trainer else []
    number = next((port.get("containerPort") for port in ports if port.get("name") == PORT_NAME), PORT)
    return int(number or PORT)


@rule("PT402", "warning", fix="name a version or a digest", kinds=ALL)
def image_not_pinned(job: Job) -> Iterator[Diagnostic]:
    """An image without a tag, or of the tag latest, is another one at each restart.

    Pods of one job may differ, too.
    """
    loose: dict[str, Place] = {}
    for container in job.containers:
        image = str(container.spec.get("image") or "")
        fixed = "@" in image or "$" in image or "{" in image
        if image and not fixed and (":" not in image.rsplit("/", 1)[-1] or image.endswith(":latest")):
            loose.setdefault(image, (*container.path, "image"))
    if loose:
        names = f"image {next(iter(loose))} is" if len(loose) == 1 else f"images {', '.join(loose)} are"
        yield Diagnostic(next(iter(loose.values())), f"the {names} not pinned")


@rule("PT403", "warning", fix="put it into a Secret and refer to it: valueFrom.secretKeyRef", kinds=ALL)
def secret_in_plain_text(job: Job) -> Iterator[Diagnostic]:
    """A token or password as a literal is readable by everybody who may read the job or the repository."""
    for container in job.containers:
        for index, entry in container.env:
            if secret(str(entry["name"]), str(entry.get("value") or "")):
                message = f"{entry['name']} holds a secret in plain text"
                yield Diagnostic((*container.path, "env", index), message)
        for key in ("command", "args"):
            for index, word in enumerate(container.spec.get(key) or []):
                if SECRET_VALUE.search(str(word)):
                    yield Diagnostic((*container.path, key, index), f"{key} holds a secret in plain text")
    places = [(("metadata",), job.metadata)]
    places += [(each.metadata_path, each.metadata) for each in job.own_templates]  # type: ignore[misc]
    for place, metadata in places:
        for name, value in dig(metadata, "annotations").items():
            if SECRET_VALUE.search(str(value)):
                message = f"the annotation {name} holds a secret in plain text"
                yield Diagnostic((*place, "annotations", name), message)


def secret(name: str, value: str) -> bool:
    """True if a variable of this name and value is a secret written down."""
    if SECRET_VALUE.search(value):
        return True
    named = SECRET_NAME.search(name) and not NOT_SECRET.match(name)
    if not named or len(value) < 6 or VARIABLE.search(value) or value.startswith(("/", "$", "<")):
        return False
    if re.fullmatch(r"[\d.]+|true|false|none|null|changeme", value, re.IGNORECASE):
        return False
    # a name of an object, as in HF_SECRET: my-secret-name, rather than what is in it
    return not (
        re.fullmatch(r"[a-z]+([-.][a-z0-9]+)+", value) and name.upper().endswith(("SECRET", "CREDENTIALS"))
    )


@rule("PT404", "note", fix=f'{ISTIO}: "false" as a label or annotation of the template')
def istio_sidecar(job: Job) -> Iterator[Diagnostic]:
    """A proxy that Istio injects may never end, so neither does the job; and it cuts the collectives off.

    Harmless without Istio.
    """
    for template in job.templates:
        labels, annotations = dig(template.metadata, "labels"), dig(template.metadata, "annotations")
        values = {str(mapping.get(ISTIO, "")).lower() for mapping in (labels, annotations)}
        if "true" in values:
            yield Diagnostic(template.metadata_path, "{role} asks for Istio's sidecar", "warning")
        elif "false" not in values:
            yield Diagnostic(template.metadata_path, "{role} does not turn Istio's sidecar off")


@rule("PT405", "warning", fix=f"select by {LABEL}job-name, replica-type and replica-index", kinds=JOBS)
def old_labels(job: Job) -> Iterator[Diagnostic]:
    """A selector with pytorch-job-name and the like finds no pod: the labels are gone since operator 1.5."""
    for template in job.templates:
        own = dig(template.metadata, "labels")
        text = str({key: template.pod.get(key) for key in ("affinity", "topologySpreadConstraints")})
        for label in OLD_LABELS:
            if f"'{label}'" in text and label not in own:
                yield Diagnostic((*template.pod_path, "affinity"), f"{{role}} selects pods by {label}")
    if any("pytorch-job-name" in dig(template.metadata, "labels") for template in job.templates):
        return
    for other in job.context.selectors:
        if f"'{job.name}'" in str(other.content):
            yield Diagnostic((), f"{other.kind} {other.name} selects pods by pytorch-job-name")


@rule("PT406", "warning", fix="drop it; training needs none of this", kinds=ALL)
def privileged(job: Job) -> Iterator[Diagnostic]:
    """A privileged container, or one that shares the host's processes or root folder, is root on the node."""
    for template in job.own_templates:
        if template.pod.get("hostPID"):
            yield Diagnostic((*template.pod_path, "hostPID"), "{role} sets hostPID")
        if template.pod.get("hostIPC"):
            yield Diagnostic((*template.pod_path, "hostIPC"), "{role} sets hostIPC", "note")
        for place, volume in template.volumes:
            if str(dig(volume, "hostPath").get("path")) == "/":
                yield Diagnostic(place, "{role} mounts the node's root folder")
    for container in job.containers:
        if dig(container.spec, "securityContext").get("privileged"):
            yield Diagnostic((*container.path, "securityContext"), f"{container.name} is privileged")
