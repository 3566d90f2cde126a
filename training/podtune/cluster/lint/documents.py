"""Reading manifests: several documents, the line of every value, and YAML errors with their place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from podtune.cluster.job.manifest import Json
from podtune.cluster.lint.diagnostic import Diagnostic, Place
from podtune.cluster.lint.values import TAG, Builder, Loader, yaml_error

JOBS = ("PyTorchJob", "TrainJob")
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
KINDS = (*JOBS, *RUNTIMES)
GROUPS = ("kubeflow.org", "trainer.kubeflow.org")


@dataclass
class Document:
    """One YAML document, or an object inside one: an item of a List, a job in an AppWrapper."""

    content: Json
    source: str
    node: Any = field(repr=False)
    holder: str = ""  # the kind of the object around it

    @property
    def kind(self) -> str:
        return str(self.content.get("kind") or "")

    @property
    def metadata(self) -> Json:
        metadata = self.content.get("metadata")
        return metadata if isinstance(metadata, dict) else {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name") or self.metadata.get("generateName") or "")

    @property
    def namespace(self) -> str:
        return str(self.metadata.get("namespace") or "")

    @property
    def group(self) -> str:
        """The group of apiVersion, "" for core/v1."""
        version = self.content.get("apiVersion")
        return version.rpartition("/")[0] if isinstance(version, str) else ""

    def line(self, path: Place) -> int:
        """The line, from 1, of the value at ``path``, or of what is around it where that is absent."""
        node, mark = self.node, self.node.start_mark
        for key in path:
            child = _child(node, key)
            if child is None:
                break
            mark, node = child
        return int(mark.line) + 1

    def text(self, path: Place) -> str | None:
        """The scalar at ``path`` as it is written, or None."""
        node = self.node
        for key in path:
            child = _child(node, key)
            if child is None:
                return None
            node = child[1]
        return str(node.value) if isinstance(node, yaml.ScalarNode) else None


def is_foreign(document: Document) -> bool:
    """True for a kind of another operator's group, as KubeDL has a PyTorchJob too; not for a misspelt one."""
    group = document.group
    if not group or "kubeflow" in group:
        return False
    import difflib

    return not difflib.get_close_matches(group, GROUPS, n=1, cutoff=0.8)


def read(text: str, source: str) -> tuple[list[Document], list[Diagnostic]]:
    """The documents of ``text`` up to the first that is not YAML, and the errors in it.

    Where the braces of envsubst's ``${NAME}`` are what is not YAML, as in a flow mapping, they are left out.
    """
    documents, errors = _read(text, source)
    if "${" in text and any(error.message.startswith("not YAML") for error in errors):
        again = _read(re.sub(r"\$\{(\w+)[^{}\n]*\}", r"$\1", text), source)
        return again if len(again[1]) < len(errors) else (documents, errors)
    return documents, errors


def _read(text: str, source: str) -> tuple[list[Document], list[Diagnostic]]:
    documents: list[Document] = []
    errors: list[Diagnostic] = []
    loader = None
    try:
        loader = Loader(text)
        while loader.check_node():
            node = loader.get_node()
            builder = Builder(source)
            content = builder.value(node)
            errors += builder.errors
            if isinstance(content, dict):
                documents += _objects(content, node, source)
            elif content is not None:
                message, fix = "this document is not a mapping", "start it with apiVersion and kind"
                errors.append(yaml_error(source, node.start_mark.line + 1, message, fix))
    except (yaml.YAMLError, RecursionError, ArithmeticError, LookupError, ValueError) as error:
        errors.append(_explained(error, text, source))
    finally:
        if loader is not None:
            loader.dispose()
    return documents, errors


def _objects(content: Json, node: Any, source: str) -> Iterator[Document]:
    """The document itself, or the objects in a list of them or in what wraps a job."""
    if content.get("kind") in KINDS:
        yield Document(content, source, node)
        return
    kind = str(content.get("kind") or "")
    listed = kind.endswith("List") and isinstance(content.get("items"), list)
    inner = list(_inside(content, node, source, "" if listed else kind))
    if not listed:
        yield Document(content, source, node)
    yield from inner


def _inside(value: Any, node: Any, source: str, holder: str) -> Iterator[Document]:
    if isinstance(value, dict):
        pairs: Iterator[tuple[str | int, Any]] = iter(value.items())
    elif isinstance(value, list):
        pairs = iter(enumerate(value))
    else:
        return
    for key, item in pairs:
        if not isinstance(item, dict | list):
            continue
        child = _child(node, key)
        place = child[1] if child else node
        if isinstance(item, dict) and isinstance(item.get("kind"), str) and "apiVersion" in item:
            whole = "spec" in item or "metadata" in item  # not a reference, which has a name only
            if whole:
                yield from (
                    Document(inner.content, source, inner.node, inner.holder or holder)
                    for inner in _objects(item, place, source)
                )
                continue
        yield from _inside(item, place, source, holder)


def _child(node: Any, key: str | int) -> tuple[Any, Any] | None:
    """(mark of the key, node of the value), or None.

    What ``<<`` merges in is looked at last.
    """
    if isinstance(node, yaml.MappingNode):
        merged: list[Any] = []
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark, value
            if name.tag == TAG + "merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
        return next((child for alias in merged[:9] if (child := _child(alias, key))), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


def _explained(error: Exception, text: str, source: str) -> Diagnostic:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark else 1 + text.count("\n", 0, getattr(error, "position", 0))
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if isinstance(error, RecursionError):
        problem = "nested too deeply"
    context = getattr(error, "context", None)
    place = f" (column {mark.column + 1})" if mark else ""
    if re.search(r"\{\{.*\}\}", text):
        fix = "this is a Helm template: render it first, podtune render -f VALUES | podtune lint -"
    elif "\t" in text:
        fix = "indent with spaces, not tabs"
    else:
        fix = "correct the YAML at this line; the indentation above it counts, too"
    return yaml_error(source, line, f"not YAML: {context + ', ' if context else ''}{problem}{place}", fix)
