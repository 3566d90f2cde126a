"""The names that Kubernetes takes: of objects, labels and images."""

from __future__ import annotations

import re
from collections.abc import Iterator

from podtune.cluster.job.manifest import Json, dig
from podtune.cluster.lint.diagnostic import Diagnostic, Place

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # DNS-1123
SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
# may be empty, unlike a name
LABEL_VALUE = re.compile(r"(?=.{0,63}\Z)([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
QUALIFIED = re.compile(r"(?:(?P<domain>[^/]*)/)?(?=[^/]{1,63}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
# an IANA service name: a letter at least, and no two dashes in a row
PORT_NAME = re.compile(r"(?=.{1,15}\Z)(?=.*[a-z])(?!.*--)[a-z0-9]([a-z0-9-]*[a-z0-9])?")
IMAGE = re.compile(
    r"(?:(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?)*|\[[a-fA-F0-9:]+\])"
    r"(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*"
    r"(?::[\w][\w.-]{0,127})?(?:@[A-Za-z][A-Za-z0-9]*(?:[-_+.][A-Za-z][A-Za-z0-9]*)*:[0-9a-fA-F]{32,})?"
)


def metadata(mapping: Json, path: Place) -> Iterator[Diagnostic]:
    """Refusals of the labels and annotations of an object, under the code PT021."""
    yield from labels(dig(mapping, "labels"), (*path, "labels"))
    for key in dig(mapping, "annotations"):
        yield from qualified(key, (*path, "annotations", key), "annotation")


def labels(mapping: Json, path: Place) -> Iterator[Diagnostic]:
    for key, value in mapping.items():
        yield from qualified(key, (*path, key), "label")
        if isinstance(value, str) and not LABEL_VALUE.fullmatch(value):
            length = f" ({len(value)} characters)" if len(value) > 63 else ""
            message = f"the label {key} cannot have the value {value[:70]!r}{length}"
            fix = "at most 63 letters, digits, '-', '_' and '.', with a letter or digit at both ends"
            yield Diagnostic((*path, key), message, fix=fix, code="PT021")


def qualified(key: str, path: Place, what: str) -> Iterator[Diagnostic]:
    """A name, or a domain, a slash and a name; annotations take capitals in the domain."""
    match = QUALIFIED.fullmatch(key)
    domain = match["domain"] if match else None
    if domain is not None and what == "annotation":
        domain = domain.lower()
    if match is None or (domain is not None and not SUBDOMAIN.fullmatch(domain)):
        fix = "at most 63 letters, digits, '-', '_' and '.', before them a domain and a slash if needed"
        message = f"{key!r} cannot be the key of a{'n' * (what[0] == 'a')} {what}"
        yield Diagnostic(path, message, fix=fix, code="PT021")
