"""PT4: what a pod relies on outside itself, and what it gives away."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.job.pytorchjob import LABEL, PORT, PORT_NAME
from podtune.cluster.lint.diagnostic import Diagnostic, Place, Severity
from podtune.cluster.lint.documents import OPERATED
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import ALL, rule
from podtune.cluster.lint.schema import VARIABLE

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
PLACEHOLDER = re.compile(r"[/$<]|([\d.]+|true|false|none|null|changeme)\Z", re.IGNORECASE)
OBJECT_NAME = re.compile(r"[a-z]+([-.][a-z0-9]+)+")
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
        # the operator has Workers wait for the master's name
        waits = template.role == "Worker" and job.template("Master") is not None
        severity: Severity = "error" if waits else "warning"
        if not template.pod.get("hostNetwork"):
            if template.pod.get("dnsPolicy") == "Default":
                message = "dnsPolicy of {role} is Default, the node's: Services do not resolve"
                at, fix = (*template.pod_path, "dnsPolicy"), "dnsPolicy: ClusterFirst, or leave it out"
                yield Diagnostic(at, message, severity, fix)
            continue
        if template.pod.get("dnsPolicy") not in ("ClusterFirstWithHostNet", "None"):
            message = f"hostNetwork of {{role}} without {HOST_DNS}: Services do not resolve"
            yield Diagnostic(place, message, severity, HOST_DNS)
        ports = template.main.ports if template.main else []
        if all(port.get("name") != PORT_NAME or port.get("containerPort") == PORT for port in ports):
            yield Diagnostic(place, f"hostNetwork of {{role}} with the default port {PORT}", "warning")


@rule("PT407", "error", by="operator", fix="name it, or leave it out")
def ports_without_a_service(job: Job) -> Iterator[Diagnostic]:
    """The operator cannot make a pod's Service of a port without a name, or of one number twice.

    It adds its own, pytorchjob-port 23456, to those of the container pytorch. Without Services no name of a
    pod resolves: the workers wait, and the job gets no status.
    """
    for _, container in job.mains():
        ports = container.ports
        named = any(port.get("name") == PORT_NAME for port in ports)
        seen: set[object] = set() if named else {PORT}
        for index, port in enumerate(ports):
            place, number = (*container.path, "ports", index), port.get("containerPort")
            if not port.get("name") and (len(ports) > 1 or not named):
                yield Diagnostic(place, f"the port {number} has no name, as a Service of two ports needs")
            elif number in seen:
                also = f", as {PORT_NAME} that the operator adds" if number == PORT and not named else ""
                fix = f"name it {PORT_NAME}" if also else "keep one of them"
                yield Diagnostic(place, f"the port {number} is there twice{also}", fix=fix)
            seen.add(number)


@rule("PT402", "warning", fix="name a version or a digest", kinds=ALL)
def image_not_pinned(job: Job) -> Iterator[Diagnostic]:
    """An image without a tag, or of the tag latest, is another one at each restart.

    Pods of one job may differ, too.
    """
    loose: dict[str, Place] = {}
    for container in job.containers:
        _, colon, tag = container.image.rsplit("/", 1)[-1].partition(":")
        # a digest pins it, and what a variable stands for is not known
        if container.image and not re.search(r"[@${]", container.image) and (not colon or tag == "latest"):
            loose.setdefault(container.image, (*container.path, "image"))
    if loose:
        yield Diagnostic(next(iter(loose.values())), f"not pinned: {', '.join(loose)}")


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
    places: list[tuple[Place, Json]] = [(("metadata",), job.metadata)]
    for place, metadata in [*places, *((each.metadata_path, each.metadata) for each in job.own_templates)]:
        for name, value in dig(metadata, "annotations").items():
            if SECRET_VALUE.search(str(value)):
                message = f"the annotation {name} holds a secret in plain text"
                yield Diagnostic((*place, "annotations", name), message)


def secret(name: str, value: str) -> bool:
    """True if a variable of this name and value is a secret written down."""
    if SECRET_VALUE.search(value):
        return True
    if not SECRET_NAME.search(name) or NOT_SECRET.match(name) or len(value) < 6 or VARIABLE.search(value):
        return False
    # a name of an object, as in HF_SECRET: my-secret-name, rather than what is in it
    of_object = name.upper().endswith(("SECRET", "CREDENTIALS")) and OBJECT_NAME.fullmatch(value)
    return not of_object and not PLACEHOLDER.match(value)


@rule("PT404", "note", fix=f'{ISTIO}: "false" as a label or annotation of the template')
def istio_sidecar(job: Job) -> Iterator[Diagnostic]:
    """A proxy that Istio injects may never end, so neither does the job; and it cuts the collectives off.

    Harmless without Istio.
    """
    for template in job.templates:
        given = dig(template.metadata, "annotations") | dig(template.metadata, "labels")
        if given.get(ISTIO) == "true":
            yield Diagnostic(template.metadata_path, "{role} asks for Istio's sidecar", "warning")
        elif given.get(ISTIO) != "false":
            yield Diagnostic(template.metadata_path, "{role} does not turn Istio's sidecar off")


@rule("PT405", "warning", fix=f"select by {LABEL}job-name, replica-type and replica-index", kinds=OPERATED)
def old_labels(job: Job) -> Iterator[Diagnostic]:
    """A selector with pytorch-job-name and the like finds no pod: the labels are gone since operator 1.5."""
    for template in job.templates:
        text = str({key: template.pod.get(key) for key in ("affinity", "topologySpreadConstraints")})
        for label in OLD_LABELS:
            if f"'{label}'" in text and label not in dig(template.metadata, "labels"):
                yield Diagnostic((*template.pod_path, "affinity"), f"{{role}} selects pods by {label}")
    for other in job.context.selectors:
        if f"'{job.name}'" in str(other.content):
            yield Diagnostic((), f"{other.title} selects pods by pytorch-job-name")
