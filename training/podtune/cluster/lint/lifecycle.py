"""PT2: how the job restarts, ends and gives its GPUs back."""

from __future__ import annotations

from collections.abc import Iterator

from podtune.cluster.job.manifest import dig
from podtune.cluster.lint.command import SLEEPS
from podtune.cluster.lint.diagnostic import Diagnostic
from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import WITH_PODS, rule

# between SIGTERM and SIGKILL for its children, unless --shutdown-timeout says otherwise
TORCHRUN_SHUTDOWN_S = 30
RUN_POLICY = ("spec", "runPolicy")


@rule("PT201", "note", fix="cleanPodPolicy: Running")
def pods_stay_after_the_end(job: Job) -> Iterator[Diagnostic]:
    """Pods that hang when the job has ended keep their GPUs with cleanPodPolicy None (the default).

    Running frees them and keeps finished pods' logs.
    """
    policy = dig(job.spec, "runPolicy").get("cleanPodPolicy")
    if policy in (None, "None"):
        says = "is absent, which means None" if policy is None else "is None"
        yield Diagnostic((*RUN_POLICY, "cleanPodPolicy"), f"cleanPodPolicy {says}")


@rule("PT202", "warning", fix="backoffLimit: 3, or what a day of retries is worth")
def limits_of_the_run(job: Job) -> Iterator[Diagnostic]:
    """A job that cannot work restarts for ever without backoffLimit, and holds its GPUs meanwhile (a note).

    A negative limit is none, a ttlSecondsAfterFinished of minutes deletes the job and its logs before anybody
    has read them, and a minAvailable above the job's pods waits for pods that do not exist.
    """
    policy = dig(job.spec, "runPolicy")
    restarting = [each for each in job.templates if each.restart_policy != "Never"]
    if restarting and "backoffLimit" not in policy:
        message = f"restartPolicy {restarting[0].restart_policy} and no backoffLimit"
        yield Diagnostic((*RUN_POLICY, "backoffLimit"), message, "note")
    for field, least in (("backoffLimit", 0), ("ttlSecondsAfterFinished", 600), ("activeDeadlineSeconds", 1)):
        if policy.get(field, least) < least:
            message = f"{field} is {policy[field]}, below {least}"
            yield Diagnostic((*RUN_POLICY, field), message, fix=f"give it {least} or more, or leave it out")
    available = dig(policy, "schedulingPolicy").get("minAvailable", 0)
    if job.pods and not 0 <= available <= job.pods:
        message = f"minAvailable is {available} and the job has {job.pods} pods"
        place = (*RUN_POLICY, "schedulingPolicy", "minAvailable")
        yield Diagnostic(place, message, fix="leave it out: the default is all pods")


@rule("PT203", "warning", fix="restartPolicy: OnFailure, or start it by podtune launch")
def exit_code_under_torchrun(job: Job) -> Iterator[Diagnostic]:
    """RestartPolicy ExitCode never retries under torchrun.

    It retries codes of 128 and above, and torchrun turns every failure into 1.
    """
    for template, container in job.mains():
        # podtune launch hands the rank's own code on
        if template.restart_policy == "ExitCode" and container.launch.kind == "torchrun":
            place = (*template.path, "restartPolicy")
            yield Diagnostic(place, "restartPolicy ExitCode of {role} with bare torchrun")


@rule("PT204", "note", fix="more than 30 s plus the time of a save: 120")
def grace_shorter_than_a_save(job: Job) -> Iterator[Diagnostic]:
    """A checkpoint cannot be saved within terminationGracePeriodSeconds.

    The kubelet kills a pod that long (30 s if unset) after SIGTERM, and torchrun alone may use 30 s.
    """
    for template in job.templates:
        grace = template.pod.get("terminationGracePeriodSeconds")
        if grace is None or grace <= TORCHRUN_SHUTDOWN_S:
            says = "is absent, which means 30" if grace is None else f"is {grace}"
            place = (*template.pod_path, "terminationGracePeriodSeconds")
            yield Diagnostic(place, f"terminationGracePeriodSeconds of {{role}} {says}")


@rule("PT205", "warning", fix="remove it; the operator watches the process", kinds=WITH_PODS)
def probe_on_the_trainer(job: Job) -> Iterator[Diagnostic]:
    """A livenessProbe or startupProbe kills a training that is busy compiling, loading or saving.

    A readinessProbe of the Master deadlocks if it needs the training to run: workers wait for the master's
    DNS name, which appears when it is ready.
    """
    for template, container in job.mains():
        readiness = template.role == "Master" and job.template("Worker") is not None
        for probe in ("livenessProbe", "startupProbe", *(["readinessProbe"] if readiness else [])):
            if probe in container.spec:
                yield Diagnostic((*container.path, probe), f"the trainer of {{role}} has a {probe}")


@rule("PT206", "error", by="hang", fix="restartPolicy: OnFailure beside replicas")
def restart_policy(job: Job) -> Iterator[Diagnostic]:
    """RestartPolicy Always restarts a container that has finished, too, so the job never ends.

    On a Worker beside a Master only its pods stay (a warning). One inside the pod template is overwritten by
    the replica's, OnFailure if unset (a warning).
    """
    for template in job.templates:
        if template.restart_policy == "Always":
            others = template.role != "Master" and job.template("Master") is not None
            place = (*template.path, "restartPolicy")
            yield Diagnostic(place, "restartPolicy of {role} is Always", "warning" if others else "")
        policy = template.pod.get("restartPolicy", template.restart_policy)
        if policy != template.restart_policy:
            message = f"the template says {policy}, {{role}}'s restartPolicy is {template.restart_policy}"
            yield Diagnostic((*template.pod_path, "restartPolicy"), message, "warning")


@rule("PT209", "warning", fix="make it an init container with restartPolicy: Always", kinds=WITH_PODS)
def container_beside_the_trainer(job: Job) -> Iterator[Diagnostic]:
    """A container beside the trainer that never ends keeps the job from ending.

    A pod has succeeded when all its containers have.
    """
    for template, main in job.mains():
        for container in template.containers:
            if container.name != main.name:
                message = f"{container.name!r} beside the trainer of {{role}} has to end by itself"
                yield Diagnostic(container.path, message)


@rule("PT213", "error", by="hang", fix="let it end, or remove it", kinds=WITH_PODS)
def only_sleeps(job: Job) -> Iterator[Diagnostic]:
    """An init container that only sleeps never ends, so the trainer never starts.

    A trainer that does is one to log in to (a warning): the job never ends.
    """
    for template in job.templates:
        for container in template.init_containers:
            # a native sidecar is an init container that is meant to run on
            sidecar = container.spec.get("restartPolicy") == "Always"
            if SLEEPS.fullmatch(" ".join(container.words)) and not sidecar:
                message = f"the init container {container.name!r} of {{role}} never ends"
                yield Diagnostic(container.path, message)
    for _, container in job.mains():
        if SLEEPS.fullmatch(" ".join(container.words)):
            yield Diagnostic(container.command_path, "the trainer of {role} only sleeps", "warning")
