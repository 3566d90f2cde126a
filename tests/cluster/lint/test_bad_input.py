"""No input is a traceback, an endless run, or an escape sequence on the terminal."""

from __future__ import annotations

import copy
import io
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.lint_examples import main
from typer.testing import CliRunner

from podtune.cluster.lint.check import lint
from podtune.cluster.lint.explain import examples
from podtune.cluster.lint.output import FORMATS, as_text
from podtune.run.errors import UserError

SHAPES: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("jobs_that_run.yaml").read_text(encoding="utf-8")
)
JUNK: list[Any] = [
    *(None, 0, -1, 1, 10**12, 0.5, float("nan"), float("inf"), True, "", " ", "x", "-", "0", "1e999"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, "a\nb", "\x1b[31mred", "ü" * 300, "$(X)", "${Y}"),
    *("a b", "/", "..", ["a"], [{}], [{"name": "x"}], "9" * 500),
]


def bomb(levels: int) -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines)


BAD = {
    "an alias bomb": bomb(10),
    "an alias bomb in a job": examples()["base"].replace("name: run", "name: run\n  labels: &l {a: b}", 1)
    + bomb(8),
    "an anchor that contains itself": "a: &a [*a]",
    "a merge cycle": "a: &a {<<: *a}",
    "a merge of a text": "a: {<<: x}",
    "brackets without end": "[" * 3000,
    "nested deeply": "".join(f"{' ' * n}a:\n" for n in range(600)),
    "a number of many digits": "a: " + "9" * 100_000,
    "a python object": "!!python/object/apply:os.system ['true']",
    "a tag of its own": "a: !secret x",
    "NUL": "a: \0",
    "a list as a key": "? [a]\n: b",
    "tabs": "a:\n\t- b",
    "a set": "a: !!set {x, y}",
    "a binary": "a: !!binary aGVsbG8=",
    "a lone surrogate": 'a: "\\ud800"',
}


@pytest.mark.parametrize("name", BAD)
def test_odd_yaml_ends_soon_and_in_a_sentence(name: str) -> None:
    started = time.process_time()
    verdict = lint([("-", BAD[name])])
    assert time.process_time() - started < 5  # of the processor, on a machine that has other work
    for write in FORMATS.values():
        write(verdict)
    assert all(finding.code == "PT001" for finding in verdict.findings)


def test_a_million_nodes_are_one_template() -> None:
    text = SHAPES["trainjob-with-torchrun"].replace("numNodes: 3", "numNodes: 1000000")
    started = time.process_time()
    assert lint([("t.yaml", text)]).jobs == ["TrainJob nodes"]
    assert time.process_time() - started < 1


def test_runtimes_of_any_shape_stand_beside_a_trainjob() -> None:
    for metadata in (["x"], {"labels": ["a"], "name": "torch-distributed"}, {"name": ["a"]}, None, "x"):
        runtime = {"kind": "ClusterTrainingRuntime", "metadata": metadata, "spec": {"template": [1]}}
        lint([("t.yaml", yaml.safe_dump(runtime) + "---\n" + SHAPES["trainjob-without-trainer"])])


def mutated(value: Any, random: random.Random) -> Any:
    """A copy with something somewhere exchanged, removed, doubled, renamed or moved."""
    copied = copy.deepcopy(value)
    holders: list[Any] = []

    def gather(node: Any) -> None:
        if isinstance(node, dict | list) and node:
            holders.append(node)
            for child in node.values() if isinstance(node, dict) else node:
                gather(child)

    gather(copied)
    for _ in range(random.randint(1, 3)):
        holder = random.choice(holders)
        if not holder:
            continue
        key = random.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
        match random.randrange(5):
            case 0:
                holder[key] = copy.deepcopy(random.choice(JUNK))
            case 1:
                del holder[key]
            case 2 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 3 if isinstance(holder, dict):
                holder[str(key).upper() if random.random() < 0.5 else random.choice([1, True, "", "x y"])] = (
                    holder.pop(key)
                )
            case _:
                holder[key] = copy.deepcopy(random.choice(holders[:50]))
    return copied


def test_two_thousand_mutated_manifests_are_judged_without_a_traceback() -> None:
    generator = random.Random(20261121)
    documents = [list(yaml.safe_load_all(text)) for text in SHAPES.values()]
    documents += [[yaml.safe_load(examples()[name])] for name in ("base", "trainjob", "runtime")]
    started = time.process_time()
    for number in range(2000):
        mutants = mutated(generator.choice(documents), generator)
        if number % 4 == 0:
            text = json.dumps(mutants)  # one list, which is no manifest
            text = "\n---\n".join(json.dumps(one) for one in mutants) if isinstance(mutants, list) else text
        else:
            text = yaml.dump_all(mutants if isinstance(mutants, list) else [mutants], Dumper=yaml.CSafeDumper)
        if generator.random() < 0.1:
            place = generator.randrange(len(text) + 1)
            text = (
                text[:place] + generator.choice(["\t", "{", "*x", "&x", "\x00", ": :", "\x1b"]) + text[place:]
            )
        verdict = lint([("mutant.yaml", text)])
        written = as_text(verdict, notes=True)
        assert all(one.isprintable() or one == "\n" for one in written)
        if number % 20 == 0:
            for write in FORMATS.values():
                write(verdict)
    assert time.process_time() - started < 60  # half of it on a machine without other work


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_what_a_manifest_says_cannot_steer_the_terminal(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = yaml.safe_load(examples()["base"])
    job["metadata"]["name"] = "a\x1b[2J\n::error::forged"
    file = tmp_path / "job\x1b[2J.yaml"
    file.write_text(yaml.safe_dump(job))
    assert main([str(file), "--format", form]) == 65
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert not any(line.startswith("::error::forged") for line in out.splitlines())


def test_stdin_that_is_not_utf_8_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a: \xff\xfe")))
    with pytest.raises(UserError, match="not UTF-8") as latin:
        main(["-"])
    assert latin.value.code == 66


def test_two_thousand_jobs_take_seconds() -> None:
    text = "---\n".join(
        examples()["base"].replace("name: run", f"name: run-{number}") for number in range(2000)
    )
    started = time.process_time()
    verdict = lint([("many.yaml", text)])
    assert (len(verdict.jobs), verdict.findings) == (2000, [])
    assert time.process_time() - started < 30  # three on a machine without other work


COMMANDS = {
    "values": ["render", "-f", "FILE"],
    "a manifest": ["submit", "--manifest", "FILE"],
    "a manifest to rewrite": ["migrate", "FILE"],
    "a kubeconfig": ["status", "run"],
    "an object or a log": ["why", "FILE"],
    "a sweep": ["sweep", "FILE", "--output", "OUT"],
    "a sweep of the benchmark": ["bench", "run", "--sweep", "FILE", "--output", "OUT"],
    "a configuration": ["data", "inspect", "--config", "FILE"],
    "a configuration in a pod": ["prepare", "--config", "FILE"],
    "a configuration before training": ["preflight", "--config", "FILE"],
}


@pytest.mark.parametrize("what", COMMANDS)
def test_hostile_yaml_in_any_file_ends_soon_and_in_a_sentence(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from podtune.cli import app

    file = tmp_path / "hostile.yaml"
    monkeypatch.setenv("KUBECONFIG", str(file))
    words = [{"FILE": str(file), "OUT": str(tmp_path / "out")}.get(word, word) for word in COMMANDS[what]]
    for name, text in {**BAD, "not UTF-8": "a: \udcff"}.items():
        file.write_bytes(text.encode(errors="surrogateescape"))
        started = time.process_time()
        ended = CliRunner().invoke(app, words)
        assert time.process_time() - started < 5, name
        assert ended.exception is None or isinstance(ended.exception, SystemExit | UserError), name


def test_a_date_in_values_is_text_as_in_helm(tmp_path: Path) -> None:
    from podtune.cluster.chart.render import merged_values

    (tmp_path / "values.yaml").write_text("podAnnotations: {since: 2026-01-01}")
    assert merged_values([tmp_path / "values.yaml"], []) == {"podAnnotations": {"since": "2026-01-01"}}
