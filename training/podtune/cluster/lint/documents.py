"""Reading manifests: several documents, the line of every value, and YAML errors with their place.

YAML is read as kubectl does, which is not quite PyYAML's way: a date and ``1:30`` are strings, ``5e-5`` is a
number, and the keys of a mapping are always strings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from podtune.cluster.job.manifest import Json
from podtune.cluster.lint.diagnostic import Diagnostic, Place

OPERATED = ("PyTorchJob", "TrainJob")
JOBS = (*OPERATED, "Job")
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
KINDS = (*JOBS, *RUNTIMES)
GROUPS = ("kubeflow.org", "trainer.kubeflow.org")
MAX_DEPTH = 200
# How many times as large as it is a document may be with its aliases written out, beyond 100,000 values.
MAX_GROWTH = 10
TAG = "tag:yaml.org,2002:"
#: what a Job has that starts the processes of one training
DISTRIBUTED = re.compile(r"torchrun|torch\.distributed|podtune\.training|PET_|MASTER_ADDR")
# The C parser where PyYAML was built with it: twenty times as fast.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Loader(_Base):  # type: ignore[misc]
    """PyYAML's safe loader with the scalars of YAML 1.2, and strings as keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, object]:
        return {_key(key): value for key, value in super().construct_mapping(node, deep).items()}


OTHERS = [TAG + name for name in ("timestamp", "value", "int", "float")]  # as YAML 1.1 has them
Loader.yaml_implicit_resolvers = {
    first: [resolver for resolver in resolvers if resolver[0] not in OTHERS]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}
_INT = re.compile(r"[-+]?(0(b[01_]+|o?[0-7_]+|x[0-9a-fA-F_]+)?|[1-9][0-9_]*)\Z")
_FLOAT = re.compile(
    r"([-+]?((\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|\.(inf|Inf|INF))|\.(nan|NaN|NAN))\Z"
)
Loader.add_implicit_resolver(TAG + "int", _INT, list("-+0123456789"))
Loader.add_implicit_resolver(TAG + "float", _FLOAT, list("-+0123456789."))


def _key(key: Any) -> str:
    if isinstance(key, bool):
        return str(key).lower()
    return "null" if key is None else str(key)


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
    def metadata(self) -> dict[str, object]:
        metadata = self.content.get("metadata")
        return metadata if isinstance(metadata, dict) else {}

    @property
    def name(self) -> str:
        return str(self.metadata.get("name") or self.metadata.get("generateName") or "")

    @property
    def title(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def group(self) -> str:
        """The group of apiVersion, "" for core/v1."""
        version = self.content.get("apiVersion")
        return version.rpartition("/")[0] if isinstance(version, str) else ""

    @property
    def is_foreign(self) -> bool:
        """True for another operator's group, as KubeDL has a PyTorchJob too; not for a misspelt one."""
        group = self.group
        known = not group or "kubeflow" in group
        return not known and not difflib.get_close_matches(group, GROUPS, n=1, cutoff=0.8)

    @property
    def is_linted(self) -> bool:
        """True for Kubeflow's kinds, and for a Job whose pods are the processes of one training."""
        if self.kind != "Job":
            return self.kind in KINDS and not self.is_foreign
        spec = self.content.get("spec")
        if self.group != "batch" or not isinstance(spec, dict):
            return False
        several = spec.get("completionMode") == "Indexed" or spec.get("parallelism") not in (None, 0, 1)
        return several and bool(DISTRIBUTED.search(str(spec)))

    def _along(self, path: Place) -> list[tuple[Any, Any]]:
        """Mark and node of the document, and of each value on the way to ``path`` that there is."""
        found = [(self.node.start_mark, self.node)]
        for key in path:
            child = _child(found[-1][1], key)
            if child is None:
                break
            found.append(child)
        return found

    def line(self, path: Place) -> int:
        """The line, from 1, of the value at ``path``, or of what is around it where that is absent."""
        return int(self._along(path)[-1][0].line) + 1

    def text(self, path: Place) -> str | None:
        """The scalar at ``path`` as it is written, or None."""
        found = self._along(path)
        node = found[-1][1] if len(found) > len(path) else None
        return str(node.value) if isinstance(node, yaml.ScalarNode) else None


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
    try:
        loader = Loader(text)
        while loader.check_node():
            node = loader.get_node()
            for key in _doubled_keys(node):
                message = f"{key.value!r} is given twice; the last one wins"
                errors.append(_not_yaml(source, key.start_mark.line + 1, message, "remove one of them"))
            content = loader.construct_document(node)
            if isinstance(content, dict):
                documents += _objects(content, node, source)
            elif content is not None:
                message, fix = "this document is not a mapping", "start it with apiVersion and kind"
                errors.append(_not_yaml(source, node.start_mark.line + 1, message, fix))
    except (yaml.YAMLError, RecursionError, ArithmeticError, LookupError, ValueError) as error:
        errors.append(_explained(error, text, source))
    return documents, errors


def _doubled_keys(root: Any) -> Iterator[Any]:
    """Yield the nodes of keys that their mapping has already.

    Raises:
        ConstructorError: the document, with its aliases written out, has too many values or too deep ones.
    """
    waiting, count, seen = [(root, 0)], 0, set[int]()
    while waiting:
        node, depth = waiting.pop()
        first, count = id(node) not in seen, count + 1
        seen.add(id(node))
        problem = ""
        if depth > MAX_DEPTH:
            problem = f"nested deeper than {MAX_DEPTH}, or an anchor contains itself"
        elif count > 100_000 + MAX_GROWTH * len(seen):
            problem = f"its aliases stand for more than {count} values"
        if problem:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        if isinstance(node, yaml.MappingNode):
            waiting += [(value, depth + 1) for _, value in node.value]
            names: set[str] = set()
            for key, _ in node.value if first else ():
                # a mapping may have several << merged into it
                if isinstance(key, yaml.ScalarNode) and key.tag != TAG + "merge":
                    if key.value in names:
                        yield key
                    names.add(key.value)
        elif isinstance(node, yaml.SequenceNode):
            waiting += [(item, depth + 1) for item in node.value]


def _objects(content: Json, node: Any, source: str, holder: str = "") -> Iterator[Document]:
    """The document itself, or the objects in a list of them or in what wraps a job."""
    kind = str(content.get("kind") or "")
    listed = kind.endswith("List") and isinstance(content.get("items"), list)
    if not listed:
        yield Document(content, source, node, holder)
    if kind not in KINDS:  # a Job, too, holds nothing else
        yield from _inside(content, node, source, holder if listed else holder or kind)


def _inside(value: Any, node: Any, source: str, holder: str) -> Iterator[Document]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in pairs:
        child = _child(node, key)
        place = child[1] if child else node
        if isinstance(item, dict) and _is_object(item):
            yield from _objects(item, place, source, holder)
        elif isinstance(item, dict | list):
            yield from _inside(item, place, source, holder)


def _is_object(item: Json) -> bool:
    """True for a whole object; a reference to one has a name only."""
    named = isinstance(item.get("kind"), str) and "apiVersion" in item
    return named and ("spec" in item or "metadata" in item)


def _child(node: Any, key: str | int) -> tuple[Any, Any] | None:
    """(mark of the key, node of the value), or None."""
    if isinstance(node, yaml.MappingNode):
        # own keys stand behind those that << merged in
        pairs = ((name.start_mark, value) for name, value in reversed(node.value) if name.value == str(key))
        return next(pairs, None)
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        return node.value[key].start_mark, node.value[key]
    return None


def _explained(error: Exception, text: str, source: str) -> Diagnostic:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark else 1 + text.count("\n", 0, getattr(error, "position", 0))
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if context := getattr(error, "context", None):
        problem = f"{context}, {problem}"
    place = f" (column {mark.column + 1})" if mark else ""
    if re.search(r"\{\{.*\}\}", text):
        fix = "this is a Helm template: render it first, podtune render -f VALUES | podtune lint -"
    elif "\t" in text:
        fix = "indent with spaces, not tabs"
    else:
        fix = "correct the YAML at this line; the indentation above it counts, too"
    return _not_yaml(source, line, f"not YAML: {problem}{place}", fix)


def _not_yaml(source: str, line: int, message: str, fix: str) -> Diagnostic:
    return Diagnostic((), message, "error", fix, "api", "PT001", source=source, line=line)
