"""The chart as manifests: by the helm on PATH, else by helm-python-sdk. Both give the same text."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import yaml

from podtune.cluster.chart.refusals import explained
from podtune.run.errors import ConfigError, NotFound, Unavailable, UsageError
from podtune.run.yaml_text import load

if TYPE_CHECKING:
    from helm_python import Chart

_SHIPPED = Path(__file__).resolve().parents[2] / "shipped"  # in a wheel: pyproject.toml puts them there
_CHECKOUT = Path(__file__).resolve().parents[4]
CHART = _SHIPPED / "chart" if _SHIPPED.is_dir() else _CHECKOUT / "charts" / "podtune"
PROFILES = _SHIPPED / "values" if _SHIPPED.is_dir() else _CHECKOUT / "deploy" / "values"
Engine = Literal["auto", "helm", "python"]
Values = dict[Any, Any]

# The order in which Helm creates what this chart holds; kinds that it does not know come last, by name.
_ORDER = (
    *("NetworkPolicy", "ServiceAccount", "ConfigMap", "PersistentVolumeClaim", "Role", "RoleBinding"),
    *("Service", "Pod", "Deployment", "Job"),
)
_SOURCE = re.compile(r"^# Source: (\S+)\n", re.MULTILINE)


def rendered(values: Values, name: str, namespace: str = "default", *, engine: Engine = "auto") -> str:
    """The manifests that ``helm install NAME`` would create, in its order, each under ``# Source: FILE``.

    ``values`` are the user's (:func:`merged_values`). Test hooks are included, notes are not.

    Raises:
        UserError: a value that the schema refuses (with the near name of an unknown key), a combination that
            a template refuses, or no engine.
    """
    if engine == "auto":
        engine = "helm" if shutil.which("helm") else "python"
    documents = (_by_helm if engine == "helm" else _by_python)(values, name, namespace)
    ordered = sorted(documents, key=lambda document: _position(*document))
    return "".join(f"---\n# Source: {source}\n{text.strip()}\n" for source, text in ordered)


def merged_values(values_files: list[Path], sets: list[str]) -> Values:
    """The user's values, without the chart's defaults: files in order, then ``sets``.

    ``sets`` are of --set's grammar (``a.b=c``). Later ones win, maps merge, lists are replaced, as in Helm.

    Raises:
        UserError: a values file that is missing or not a mapping, or a wrong ``--set``.
    """
    values: Values = {}
    for file in values_files:
        _merge(values, _read_values(file))
    for expression in sets:
        # a list that is set by its indices keeps its other elements
        _merge(values, _parsed(expression), lists=bool(re.search(r"\[\d+\]", expression)))
    return values


def effective_values(values: Values) -> Values:
    """``values`` over the chart's defaults; a null removes a default, as in Helm."""
    defaults: Values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    _merge(defaults, copy.deepcopy(values))
    return _without_nulls(defaults)


def profile(name: Path) -> Path:
    """A values file: ``name`` itself if it is there, else the profile that podtune ships under that name."""
    shipped = PROFILES / f"{name}.yaml"
    return shipped if name.parent == Path() and not name.exists() and shipped.is_file() else name


def _read_values(name: Path) -> Values:
    file = profile(name)
    try:
        content = load(file.read_text(encoding="utf-8"), str(file)) or {}
    except OSError as error:
        names = ", ".join(sorted(path.stem for path in PROFILES.glob("*.yaml")))
        fix = f"name a values file, or one of podtune's profiles: {names}"
        raise NotFound(f"cannot read it: {error.strerror}", where=str(file), fix=fix) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"not YAML: {error}", where=str(file), fix="save it as UTF-8") from error
    if not isinstance(content, dict):
        raise ConfigError("is not a mapping of keys to values", where=str(file))
    return content


def _merge(into: Values, values: Values, *, lists: bool = False) -> None:
    """Put ``values`` over ``into``.

    Lists are replaced; with ``lists`` element by element, None keeping the one that is there.
    """
    for key, value in values.items():
        present = into.get(key)
        if isinstance(value, dict) and isinstance(present, dict):
            _merge(present, value, lists=lists)
        elif lists and isinstance(value, list) and isinstance(present, list):
            by_index = dict(enumerate(present))
            _merge(by_index, {i: each for i, each in enumerate(value) if each is not None}, lists=True)
            into[key] = [by_index.get(i) for i in range(max(len(present), len(value)))]
        else:
            into[key] = value


def _without_nulls(values: Values) -> Values:
    return {
        key: _without_nulls(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }


def _parsed(expression: str) -> Values:
    """One ``--set`` by Helm's own parser: ``a.b=c,d[0]=e,f={g,h}``."""
    if not shutil.which("helm"):
        helm = _library()
        try:
            values: Values = helm.parse_set_string(expression)
        except helm.HelmError as error:
            raise _wrong_set(expression, str(error)) from error
        return values
    # helm prints no values, but a chart whose template prints them does
    with tempfile.TemporaryDirectory(prefix="podtune-values-") as folder:
        (Path(folder) / "Chart.yaml").write_text("apiVersion: v2\nname: values\nversion: 0.1.0\n")
        (Path(folder) / "templates").mkdir()
        (Path(folder) / "templates" / "values.yaml").write_text("{{ toJson .Values }}\n")
        done = _helm("template", "values", folder, "--set", expression)
    if done.returncode:
        raise _wrong_set(expression, done.stderr.removeprefix("Error: ").strip())
    printed: Values = json.loads(done.stdout.splitlines()[-1])
    return printed


def _wrong_set(expression: str, reason: str) -> UsageError:
    return UsageError(f"{expression!r}: {reason}", where="--set", fix="for example --set distributed.nodes=2")


def _library() -> ModuleType:
    """helm-python-sdk: Helm's engine and its grammar of values."""
    try:
        import helm_python
    except ImportError as error:
        what = "neither helm nor helm-python-sdk is installed"
        fix = "install helm (https://helm.sh/docs/intro/install), or pip install 'podtune[render]'"
        raise Unavailable(what, where="render", fix=fix) from error
    library: ModuleType = helm_python
    return library


def _helm(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(["helm", *words], input=stdin, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"helm did not answer: {error}", where="helm") from error


def _by_helm(values: Values, name: str, namespace: str) -> list[tuple[str, str]]:
    words = ("template", name, str(CHART), "--namespace", namespace, "--values", "-")
    done = _helm(*words, stdin=json.dumps(values))
    if done.returncode:
        raise explained(done.stderr, effective_values(values), CHART)
    pieces = _SOURCE.split(re.sub(r"^---$\n?", "", done.stdout, flags=re.MULTILINE))
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def _by_python(values: Values, name: str, namespace: str) -> list[tuple[str, str]]:
    try:
        files = _chart().render(values, name=name, namespace=namespace)
    except _library().HelmError as error:
        raise explained(str(error), effective_values(values), CHART) from error
    return [
        (source, document)
        for source, text in files.items()
        # not NOTES.txt
        if source.endswith(".yaml")
        for document in re.split(r"^---\s*$\n?", text, flags=re.MULTILINE)
        if _kind(document)
    ]


@functools.cache
def _chart() -> Chart:
    """The chart as the engine's own object, loaded once: it does not change under a process."""
    return _library().Chart.load(str(CHART))


def _kind(document: str) -> str:
    kind = re.search(r"^kind: (\w+)", document, re.MULTILINE)
    return kind.group(1) if kind else ""


def _position(source: str, document: str) -> tuple[bool, int, str, str, str]:
    """Sort key of Helm's order: hooks last, kinds in its order, then by file and name."""
    kind = _kind(document)
    place = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
    name = re.search(r"^  name: (\S+)", document, re.MULTILINE)
    return ("/tests/" in source, place, kind, source, name.group(1) if name else "")
