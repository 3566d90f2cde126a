"""The cluster's API, as far as podtune needs it. The only file that imports ``kubernetes``.

Objects go in and out as plain dictionaries. Failures come within seconds: :class:`Refused` for good, or
:class:`Unreachable`, after which the next try may succeed.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from podtune.cluster.job.manifest import Json, dig, name_of
from podtune.cluster.live.errors import Unreachable, refusal
from podtune.cluster.live.kinds import JOB_KINDS, checked_name, newest_by_rank, plural_of, trains
from podtune.run.errors import NotFound

if TYPE_CHECKING:
    from urllib3 import HTTPResponse

Query = list[tuple[str, str]]

CONNECT_S, READ_S = 3.0, 20.0
MANAGER = "podtune"


class Cluster:
    """One cluster and namespace, as the kubeconfig (or the pod's ServiceAccount) gives them."""

    def __init__(self, namespace: str = "", context: str = "") -> None:
        import kubernetes
        import yaml

        configuration = kubernetes.client.Configuration()
        try:
            if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
                kubernetes.config.load_incluster_config(client_configuration=configuration)
                default = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
            else:
                file = os.environ.get("KUBECONFIG")  # the library looks at it only once, when it is imported
                kubernetes.config.load_kube_config(
                    file, context=context or None, client_configuration=configuration
                )
                contexts, active = kubernetes.config.list_kube_config_contexts(file)
                chosen = next((entry for entry in contexts if entry["name"] == context), active)
                default = (chosen.get("context") or {}).get("namespace") or "default"
        except (kubernetes.config.ConfigException, OSError) as error:
            raise _no_cluster(" ".join(str(error).split())[:200]) from error
        # of a file that holds something else than a mapping, or is made to exhaust its reader
        except (yaml.YAMLError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise _no_cluster("the file is not a kubeconfig") from error
        # several tries of some seconds each would hide a dead API server for a minute
        configuration.retries = 0
        self.namespace = checked_name(namespace or default, "--namespace")
        self.server = str(configuration.host)
        self._api = kubernetes.client.ApiClient(configuration)

    def version(self) -> str:
        """The API server's version; the quickest way to see that it answers."""
        return str(self.request("GET", "/version").get("gitVersion"))

    def request(
        self, method: str, path: str, *, body: Any = None, query: Query | None = None, patch: str = ""
    ) -> Json:
        """Call the API once; ``path`` from the root, JSON both ways.

        Raises:
            Refused: for good (401, 403, 404, 409, 422 and the like), with the API server's own reason.
            Unreachable: no answer, or one of the 5xx and 429 that pass.
        """
        with self._explained(f"{method} {path}"):
            headers = {"Accept": "application/json", "Content-Type": patch or "application/json"}
            response = self._call(method, path, query or [], headers, READ_S, body)
            content: Json = json.loads(response.data or b"{}")
            return content

    def _call(
        self, method: str, path: str, query: Query, headers: dict[str, str], read_s: float, body: Any = None
    ) -> HTTPResponse:
        response: HTTPResponse = self._api.call_api(
            path,
            method,
            query_params=query,
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _return_http_data_only=True,
            # raw: objects stay as the API server has sent them
            _preload_content=False,
            _request_timeout=(CONNECT_S, read_s),
        )
        return response

    def log_lines(
        self,
        pod: str,
        *,
        container: str = "",
        follow: bool = False,
        since: str = "",
        tail: int = 0,
        previous: bool = False,
    ) -> Iterator[str]:
        """Yield a container's log, or its last ``tail`` lines, line by line, each after its RFC 3339 time."""
        query = [("timestamps", "true"), ("follow", str(follow).lower()), ("previous", str(previous).lower())]
        limits = {"container": container, "sinceTime": since, "tailLines": tail}
        query += [(key, str(value)) for key, value in limits.items() if value]
        path = f"/api/v1/namespaces/{self.namespace}/pods/{quote(pod, safe='')}/log"
        with self._explained(f"the log of {pod}"):
            response = self._call("GET", path, query, {"Accept": "*/*"}, READ_S * 3 if follow else READ_S)
            for line in response:
                yield line.decode(errors="replace").rstrip("\n")

    def path(self, version: str, kind: str, name: str = "") -> str:
        """The path of a kind in this namespace, or of one object of it."""
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        path = f"{root}/namespaces/{self.namespace}/{plural_of(kind)}"
        return f"{path}/{quote(name, safe='')}" if name else path

    def path_of(self, document: Json) -> str:
        """The path of the object."""
        return self.path(document["apiVersion"], document["kind"], name_of(document))

    def get(self, path: str, query: Query | None = None) -> Json | None:
        """An object or list, or None if there is none."""
        try:
            return self.request("GET", path, query=query)
        except NotFound:
            return None

    def items(self, path: str, selector: str = "") -> list[Json]:
        """The objects of a list, those with the labels of ``selector``; none if the kind is unknown."""
        listing = self.get(path, [("labelSelector", selector)] * bool(selector))
        return list((listing or {}).get("items", []))

    def exists(self, document: Json) -> bool:
        """True if there is an object of the document's kind and name."""
        return self.get(self.path_of(document)) is not None

    def put(self, document: Json, *, dry_run: bool = False) -> Json:
        """Create a job, refused if it exists; create or change anything else, by server-side apply.

        Returns the object as the server has it, after its webhooks.
        """
        # without Strict the API server drops unknown fields, with a warning that nobody sees
        query = [("fieldManager", MANAGER), ("fieldValidation", "Strict")] + [("dryRun", "All")] * dry_run
        if document["kind"] in JOB_KINDS:
            path = self.path(document["apiVersion"], document["kind"])
            return self.request("POST", path, body=document, query=query)
        # a field that kubectl has set since then is taken back, rather than refused
        query.append(("force", "true"))
        patch = "application/apply-patch+yaml"
        return self.request("PATCH", self.path_of(document), body=document, query=query, patch=patch)

    def delete(self, document: Json) -> bool:
        """Delete the object and what it owns; False if it was not there."""
        try:
            # the default for a Job leaves its pods behind
            self.request("DELETE", self.path_of(document), body={"propagationPolicy": "Background"})
        except NotFound:
            return False
        return True

    def serves(self, kind: str) -> bool:
        """True if the API server knows the kind of job."""
        group = self.get(f"/apis/{JOB_KINDS[kind].version}") or {}
        return any(resource["name"] == JOB_KINDS[kind].plural for resource in group.get("resources", []))

    def may(self, verb: str, group: str, resource: str) -> bool:
        """True if this user may do ``verb`` with a resource here, or with a subresource (``pods/log``)."""
        name, _, subresource = resource.partition("/")
        attributes = {"group": group, "resource": name, "subresource": subresource}
        attributes |= {"verb": verb, "namespace": self.namespace}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": attributes},
        }
        answer = self.request("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body=review)
        return bool(dig(answer, "status").get("allowed"))

    def job(self, name: str) -> Json:
        """The job of that name, of any kind that trains.

        Raises:
            UsageError: it is not a name of an object.
            NotFound: there is none.
        """
        checked_name(name, "job")
        for kind, (version, *_) in JOB_KINDS.items():
            job = self.get(self.path(version, kind, name))
            if job is not None and trains(job := {**job, "kind": kind, "apiVersion": version}):
                return job
        what = f"there is no job {name!r} in the namespace {self.namespace}"
        fix = "podtune status lists the jobs; --namespace names another namespace"
        raise NotFound(what, where=self.server, fix=fix)

    def jobs(self) -> list[Json]:
        """All jobs of the namespace that train."""
        jobs = [
            # the items of a list come without their kind
            {**job, "kind": kind}
            for kind, (version, *_) in JOB_KINDS.items()
            for job in self.items(self.path(version, kind))
        ]
        return [job for job in jobs if trains(job)]

    def pods(self, job: Json) -> list[Json]:
        """The job's pods, the master first."""
        return self.pods_with(f"{JOB_KINDS[job['kind']].pods_label}={name_of(job)}")

    def pods_with(self, selector: str) -> list[Json]:
        """The pods that a label selector finds, by rank; of an index the newest alone."""
        return newest_by_rank(self.items(self.path("v1", "Pod"), selector))

    def kueue(self, kind: str, selector: str = "") -> list[Json] | None:
        """Kueue's objects in the namespace, None if it is not installed.

        Raises:
            Refused: they may not be read.
        """
        group = self.get("/apis/kueue.x-k8s.io")
        if group is None:
            return None
        # which one is served changes: Kueue 0.20 stopped v1beta1
        return self.items(self.path(group["preferredVersion"]["groupVersion"], kind), selector)

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        import kubernetes
        import urllib3

        try:
            yield
        except kubernetes.client.ApiException as error:
            raise refusal(error, what, self.server) from error
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(f"{self.server} does not answer: {type(reason).__name__}") from error


def _no_cluster(reason: str) -> NotFound:
    fix = "set KUBECONFIG to your cluster's file, or use --context with one of `kubectl config get-contexts`"
    return NotFound(f"no cluster is configured: {reason}", where="kubeconfig", fix=fix)


def connect(namespace: str = "", context: str = "") -> Cluster:
    """A cluster whose API server answers.

    Raises:
        UserError: none is configured.
        Unreachable: it does not answer within five seconds.
    """
    cluster = Cluster(namespace, context)
    cluster.version()
    return cluster
