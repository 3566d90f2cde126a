"""The cluster's API, as far as podtune needs it. The only file that imports ``kubernetes``.

Everything goes in and out as plain dictionaries. Failures are one of two kinds of :class:`UserError`
within seconds: :class:`Refused`, or :class:`Unreachable`, which the next try may mend.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from podtune.run.errors import (
    CONFIG,
    NO_INPUT,
    NO_PERMISSION,
    UNAVAILABLE,
    NotFound,
    UsageError,
    UserError,
)

Json = dict[str, Any]

CONNECT_S, READ_S = 3.0, 20.0
MANAGER = "podtune"
PYTORCHJOB_LABEL = "training.kubeflow.org/job-name"
#: kind: (API group and version, plural, the label by which its pods are selected)
JOB_KINDS = {
    "PyTorchJob": ("kubeflow.org/v1", "pytorchjobs", PYTORCHJOB_LABEL),
    "TrainJob": ("trainer.kubeflow.org/v1alpha1", "trainjobs", "jobset.sigs.k8s.io/jobset-name"),
}
#: what a chart of podtune can hold, with its plural, where the client has to name it
PLURALS = {
    "NetworkPolicy": "networkpolicies",
    "TrainingRuntime": "trainingruntimes",
    **{kind: plural for kind, (_, plural, _) in JOB_KINDS.items()},
}


class Unreachable(UserError):
    """The API server did not answer, or not with an answer; the next try may work."""

    def __init__(self, what: str) -> None:
        fix = "try again, or set KUBECONFIG or --context to a cluster that runs"
        super().__init__(what, where="cluster", fix=fix, code=UNAVAILABLE)


class Refused(UserError):
    """The API server's own no: a missing right or object, a webhook, what it cannot take."""


class Cluster:
    """One cluster and namespace, as the kubeconfig (or the pod's ServiceAccount) gives them."""

    def __init__(self, namespace: str = "", context: str = "") -> None:
        import kubernetes

        configuration = kubernetes.client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                kubernetes.config.load_incluster_config(client_configuration=configuration)
                mounted = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
                default = mounted.read_text().strip() if mounted.exists() else "default"
            else:
                file = os.environ.get("KUBECONFIG")  # the library looks at it only once, when it is imported
                kubernetes.config.load_kube_config(
                    file, context=context or None, client_configuration=configuration
                )
                contexts, active = kubernetes.config.list_kube_config_contexts(file)
                chosen = next((entry for entry in contexts if entry["name"] == context), active)
                default = (chosen.get("context") or {}).get("namespace") or "default"
        except (kubernetes.config.ConfigException, OSError) as error:
            raise NotFound(
                f"no cluster is configured: {' '.join(str(error).split())[:200]}",
                where="kubeconfig",
                fix="set KUBECONFIG to your cluster's file, or use --context with one of `kubectl config "
                "get-contexts`",
            ) from error
        # several tries of some seconds each would hide a dead API server for a minute
        configuration.retries = 0
        self.namespace = checked_name(namespace or default, "--namespace")
        self.server = str(configuration.host)
        self._api = kubernetes.client.ApiClient(configuration)

    def version(self) -> str:
        """The API server's version; the quickest way to see that it answers."""
        return str(self.request("GET", "/version").get("gitVersion"))

    def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: list[tuple[str, str]] | None = None,
        patch: str = "",
    ) -> Json:
        """One call of the API; ``path`` from the root, JSON both ways.

        Raises:
            Refused: for good (401, 403, 404, 409, 422 and the like), with the API server's own reason.
            Unreachable: no answer, or one of the 5xx and 429 that pass.
        """
        with self._explained(f"{method} {path}"):
            headers = {"Accept": "application/json", "Content-Type": patch or "application/json"}
            response = self._api.call_api(
                path,
                method,
                query_params=query or [],
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=(CONNECT_S, READ_S),
            )
            content: Json = json.loads(response.data or b"{}")
            return content

    def log_lines(
        self,
        pod: str,
        *,
        container: str = "",
        follow: bool = False,
        since: str = "",
        tail: int = 0,
        first_bytes: int = 0,
        previous: bool = False,
    ) -> Iterator[str]:
        """A container's log, line by line, each beginning with its RFC 3339 time; ``first_bytes`` ends it
        early, in mid-line.
        """
        query = [("timestamps", "true"), ("follow", str(follow).lower()), ("previous", str(previous).lower())]
        wanted = {"container": container, "sinceTime": since, "tailLines": tail, "limitBytes": first_bytes}
        query += [(key, str(value)) for key, value in wanted.items() if value]
        with self._explained(f"the log of {pod}"):
            response = self._api.call_api(
                f"/api/v1/namespaces/{self.namespace}/pods/{quote(pod, safe='')}/log",
                "GET",
                query_params=query,
                header_params={"Accept": "*/*"},
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=(CONNECT_S, READ_S * 3 if follow else READ_S),
            )
            rest = b""
            for chunk in response.stream(65536, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode(errors="replace")
            if rest:
                yield rest.decode(errors="replace")

    def path(self, document: Json, *, name: str = "") -> str:
        """Where a document's kind lives in this namespace, or one object of it."""
        version, kind = document["apiVersion"], document["kind"]
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        plural = PLURALS.get(kind) or f"{kind.lower()}s"
        return f"{root}/namespaces/{self.namespace}/{plural}" + (f"/{quote(name, safe='')}" if name else "")

    def get(self, path: str, query: list[tuple[str, str]] | None = None) -> Json | None:
        """An object or list, or None if there is none."""
        try:
            return self.request("GET", path, query=query)
        except UserError as error:
            if error.code == NO_INPUT:
                return None
            raise

    def apply(self, document: Json, *, dry_run: bool = False) -> Json:
        """Server-side apply: create the object, or make the existing one so."""
        query = [("fieldManager", MANAGER), ("force", "true"), ("fieldValidation", "Strict")] + [
            ("dryRun", "All")
        ] * dry_run
        path = self.path(document, name=document["metadata"]["name"])
        return self.request("PATCH", path, body=document, query=query, patch="application/apply-patch+yaml")

    def create(self, document: Json, *, dry_run: bool = False) -> Json:
        """Create the object; refused if it exists."""
        query = [("fieldManager", MANAGER), ("fieldValidation", "Strict")] + [("dryRun", "All")] * dry_run
        return self.request("POST", self.path(document), body=document, query=query)

    def delete(self, document: Json) -> bool:
        """Delete the object and what it owns; False if it was not there."""
        path = self.path(document, name=document["metadata"]["name"])
        try:
            self.request("DELETE", path, body={"propagationPolicy": "Background"})
        except Refused as error:
            if error.code == NO_INPUT:
                return False
            raise
        return True

    def serves(self, kind: str) -> bool:
        """Whether the API server knows the kind of job."""
        version, plural, _ = JOB_KINDS[kind]
        group = self.get(f"/apis/{version}")
        return group is not None and any(
            resource["name"] == plural for resource in group.get("resources", [])
        )

    def may(self, verb: str, document: Json, subresource: str = "") -> bool:
        """Whether this user may do ``verb`` with objects of the document's kind here, or with their
        ``subresource`` (log).
        """
        group, _, _ = document["apiVersion"].rpartition("/")
        plural = PLURALS.get(document["kind"]) or f"{document['kind'].lower()}s"
        attributes = {
            "namespace": self.namespace,
            "verb": verb,
            "group": group,
            "resource": plural,
            "subresource": subresource,
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool((answer.get("status") or {}).get("allowed"))

    def job(self, name: str) -> Json:
        """The job of that name, of either kind.

        Raises:
            UserError: there is none, or it is no name of an object.
        """
        checked_name(name, "job")
        for kind, (version, plural, _) in JOB_KINDS.items():
            job = self.get(f"/apis/{version}/namespaces/{self.namespace}/{plural}/{name}")
            if job is not None:
                return {**job, "kind": kind, "apiVersion": version}
        raise NotFound(
            f"there is no job {name!r} in the namespace {self.namespace}",
            where=self.server,
            fix="podtune status lists the jobs; --namespace names another namespace",
        )

    def jobs(self) -> list[Json]:
        """All jobs of the namespace."""
        jobs: list[Json] = []
        for kind, (version, plural, _) in JOB_KINDS.items():
            listing = self.get(f"/apis/{version}/namespaces/{self.namespace}/{plural}")
            jobs += [{**job, "kind": kind} for job in (listing or {}).get("items", [])]
        return jobs

    def pods(self, job: Json) -> list[Json]:
        """The job's pods, the master first."""
        return self.pods_with(f"{JOB_KINDS[job['kind']][2]}={job['metadata']['name']}")

    def pods_with(self, selector: str) -> list[Json]:
        """The pods that a label selector finds, masters first."""
        listing = self.request(
            "GET", f"/api/v1/namespaces/{self.namespace}/pods", query=[("labelSelector", selector)]
        )
        items: list[Json] = listing.get("items", [])
        return sorted(
            items, key=lambda pod: ("-master-" not in pod["metadata"]["name"], pod["metadata"]["name"])
        )

    def kueue(self, plural: str, selector: str = "") -> list[Json] | None:
        """Kueue's objects in the namespace, None if it is not installed.

        Raises:
            Refused: they may not be read.
        """
        group = self.get("/apis/kueue.x-k8s.io")
        if group is None:
            return None
        version = group["preferredVersion"]["groupVersion"]
        path = f"/apis/{version}/namespaces/{self.namespace}/{plural}"
        listing = self.get(path, [("labelSelector", selector)] * bool(selector))
        return list((listing or {}).get("items", []))

    def workloads(self, job: Json) -> list[Json]:
        """What Kueue keeps of the job; none where it may not be read."""
        try:
            return self.kueue("workloads", f"kueue.x-k8s.io/job-uid={job['metadata']['uid']}") or []
        except Refused:
            return []

    def events(self, names: list[str]) -> list[Json]:
        """Events about objects of these names, oldest first; none where they may not be read."""
        try:
            listing = self.request("GET", f"/api/v1/namespaces/{self.namespace}/events")
        except Refused:
            return []
        events = [
            event
            for event in listing.get("items", [])
            if (event.get("involvedObject") or {}).get("name") in names
        ]
        return sorted(
            events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
        )

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        import kubernetes
        import urllib3

        try:
            yield
        except kubernetes.client.ApiException as error:
            raise self._refusal(error, what) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(f"{self.server} does not answer: {type(reason).__name__}") from error

    def _refusal(self, error: Any, what: str) -> UserError:
        try:
            message = str(json.loads(error.body)["message"])
        except (ValueError, TypeError, KeyError):
            message = str(error.reason)
        if error.status in (429, 500, 502, 503, 504) and "webhook" not in message:
            return Unreachable(f"{self.server}: {message}")
        codes = {401: NO_PERMISSION, 403: NO_PERMISSION, 404: NO_INPUT, 500: UNAVAILABLE, 503: UNAVAILABLE}
        fixes = {
            401: "log in to the cluster again",
            403: "ask for the right named; `podtune submit --help` lists what it needs",
            409: "podtune delete NAME, or another --name",
            500: "look at the webhook named: kubectl -n kubeflow get pods",
        }
        return Refused(
            message, where=what, fix=fixes.get(error.status, ""), code=codes.get(error.status, CONFIG)
        )


def checked_name(name: str, where: str) -> str:
    """``name``, if Kubernetes could have such an object (RFC 1123): it becomes a part of paths of the API."""
    if len(name) > 253 or not re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name) or ".." in name:
        raise UsageError(
            f"{name!r} is no name of Kubernetes (lower-case letters, digits, dashes, dots)",
            where=where,
            fix="podtune status lists the jobs, kubectl get namespaces the namespaces",
        )
    return name


def connect(namespace: str = "", context: str = "") -> Cluster:
    """A cluster whose API server answers.

    Raises:
        UserError: none is configured.
        Unreachable: it does not answer within five seconds.
    """
    cluster = Cluster(namespace, context)
    cluster.version()
    return cluster
