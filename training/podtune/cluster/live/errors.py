"""Errors of the cluster's API."""

from __future__ import annotations

import json
from typing import Any

from podtune.run.errors import UNAVAILABLE, NoPermission, NotFound, Unavailable, UserError


class Unreachable(Unavailable):
    """The API server did not answer, or not with an answer; the next try may succeed."""

    def __init__(self, what: str) -> None:
        fix = "try again, or set KUBECONFIG or --context to a cluster that runs"
        super().__init__(what, where="cluster", fix=fix)


class Refused(UserError):
    """The API server's own no: a missing right or object, a webhook, what it cannot take."""


class Missing(Refused, NotFound):
    """An object or kind that the API server does not have."""


class Forbidden(Refused, NoPermission):
    """A right that this user lacks."""


def refusal(error: Any, what: str, server: str) -> UserError:
    """The error for an ApiException of the client library; ``what`` was asked."""
    try:
        message = str(json.loads(error.body)["message"])
    except (ValueError, TypeError, KeyError):
        message = str(error.reason)
    if error.status in (429, 500, 502, 503, 504) and "webhook" not in message:
        return Unreachable(f"{server}: {message}")
    kinds: dict[int, type[Refused]] = {401: Forbidden, 403: Forbidden, 404: Missing}
    fixes = {
        401: "log in to the cluster again",
        403: "ask for the right named; `podtune submit --help` lists what it needs",
        409: "podtune delete NAME, or another --name",
        500: "look at the webhook named: kubectl -n kubeflow get pods",
    }
    kind = kinds.get(error.status, Refused)
    code = UNAVAILABLE if error.status in (500, 503) else None
    return kind(message, where=what, fix=fixes.get(error.status, ""), code=code)
