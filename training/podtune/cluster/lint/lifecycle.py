"""PT2: how the job restarts, ends and gives its GPUs back."""

from __future__ import annotations

from collections.abc import Iterator

from podtune.cluster.lint.job import Job
from podtune.cluster.lint.rules import Found, rule

# between SIGTERM and SIGKILL for its children, unless --shutdown-timeout says otherwise
TORCHRUN_SHUTDOWN_S = 30
RUN_POLICY = ("spec", "runPolicy")


@rule("PT201", "warning", fix="cleanPodPolicy: Running", values="runPolicy.cleanPodPolicy")
def pods_stay_after_the_end(job: Job) -> Iterator[Found]:
    """With cleanPodPolicy None (the default) pods that hang when the job has ended keep their GPUs; Running
    frees them and keeps finished pods' logs.
    """
    policy = (job.spec.get("runPolicy") or {}).get("cleanPodPolicy")
    if policy in (None, "None"):
        said = "is absent, which means None" if policy is None else "is None"
        yield Found((*RUN_POLICY, "cleanPodPolicy"), f"cleanPodPolicy {said}")


@rule(
    "PT202",
    "warning",
    fix=("backoffLimit: 3, or what a day of retries is worth"),
    values="runPolicy.backoffLimit",
)
def retries_without_limit(job: Job) -> Iterator[Found]:
    """Without backoffLimit a job that cannot work restarts for ever and holds its GPUs meanwhile."""
    restarting = [one for one in job.templates if one.restart_policy in ("OnFailure", "Always", "ExitCode")]
    if restarting and (job.spec.get("runPolicy") or {}).get("backoffLimit") is None:
        yield Found(
            (*RUN_POLICY, "backoffLimit"),
            (f"restartPolicy {restarting[0].restart_policy} and no backoffLimit"),
        )


@rule(
    "PT203",
    "error",
    fix=("restartPolicy: OnFailure, or an entry point that maps exit codes (podtune launch)"),
    values="restartPolicy",
)
def exit_code_under_torchrun(job: Job) -> Iterator[Found]:
    """restartPolicy ExitCode retries codes of 128 and above, but torchrun turns every failure into 1: such a
    job never retries.
    """
    for template, container in job.mains():
        if template.restart_policy == "ExitCode" and container.launch.kind == "torchrun":
            yield Found(
                (*template.path, "restartPolicy"),
                (f"restartPolicy ExitCode of {template.role} with bare torchrun"),
            )


@rule(
    "PT204",
    "warning",
    fix=("more than 30 s plus the time of a save: 120"),
    values="terminationGracePeriodSeconds",
)
def grace_shorter_than_a_save(job: Job) -> Iterator[Found]:
    """The kubelet kills a pod terminationGracePeriodSeconds (30 if unset) after SIGTERM; torchrun alone may
    use 30 s, so a checkpoint cannot be saved.
    """
    for template in job.templates:
        grace = template.pod.get("terminationGracePeriodSeconds")
        if grace is None or grace <= TORCHRUN_SHUTDOWN_S:
            said = "is absent, which means 30" if grace is None else f"is {grace}"
            yield Found(
                (*template.pod_path, "terminationGracePeriodSeconds"),
                f"terminationGracePeriodSeconds of {template.role} {said}",
            )


@rule("PT205", "error", fix="remove it; the operator watches the process")
def readiness_probe_on_master(job: Job) -> Iterator[Found]:
    """Workers wait for the master's DNS name, which appears when it is ready: a readinessProbe that needs the
    training to run deadlocks.
    """
    master = job.template("Master")
    if master is None or job.template("Worker") is None:
        return
    for container in master.containers:
        if container.spec.get("readinessProbe") is not None:
            yield Found((*container.path, "readinessProbe"), "the Master has a readinessProbe")


@rule("PT206", "error", fix="restartPolicy: OnFailure", values="restartPolicy")
def restart_always(job: Job) -> Iterator[Found]:
    """restartPolicy Always restarts a container that has finished, too, so the job never succeeds."""
    for template in job.templates:
        if template.restart_policy == "Always":
            yield Found((*template.path, "restartPolicy"), f"restartPolicy of {template.role} is Always")


@rule(
    "PT207",
    "warning",
    fix=("set it beside replicas; the operator overwrites the template's"),
    values="restartPolicy",
)
def restart_policy_in_template(job: Job) -> Iterator[Found]:
    """A restartPolicy inside the pod template is overwritten by the replica's (OnFailure if unset)."""
    for template in job.templates:
        policy = template.pod.get("restartPolicy")
        if policy is not None and policy != template.restart_policy:
            found = (
                f"the template says {policy}, {template.role}'s restartPolicy is {template.restart_policy}"
            )
            yield Found((*template.pod_path, "restartPolicy"), found)


@rule(
    "PT208",
    "warning",
    fix=("ttlSecondsAfterFinished: a day or more, or leave it out"),
    values="runPolicy.ttlSecondsAfterFinished",
)
def gone_before_read(job: Job) -> Iterator[Found]:
    """A ttlSecondsAfterFinished of minutes deletes the job, its pods and their logs before anybody has read
    them.
    """
    ttl = (job.spec.get("runPolicy") or {}).get("ttlSecondsAfterFinished")
    if ttl is not None and ttl < 600:
        yield Found(
            (*RUN_POLICY, "ttlSecondsAfterFinished"),
            (f"the job and its logs are deleted {ttl} s after its end"),
        )
