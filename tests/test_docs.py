"""The documents say what the code says: generated parts, exit codes, links and commands."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer
import yaml

from podtune.run import errors

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "charts/podtune/README.md", ROOT / "datasets/README.md"]


@pytest.fixture(scope="module")
def config_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("config_docs", ROOT / "scripts" / "config_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["config_docs"] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_generated_parts_are_those_of_today(config_docs: Any, page: Path) -> None:
    assert page.read_text() == config_docs.filled(page.read_text()), "run scripts/config_docs.py"


def test_the_whole_training_yaml_of_the_how_to_is_one_that_training_takes(tmp_path: Path) -> None:
    from podtune.sft.config import settings

    page = (ROOT / "docs/how-to.md").read_text()
    (tmp_path / "sft.yaml").write_text(page.partition("## A whole sft.yaml")[2].split("```")[1])
    values = settings.read(["--config", str(tmp_path / "sft.yaml")], {}).values
    assert (values["lora_r"], values["use_peft"], values["max_length"]) == (16, True, 2048)


def test_every_key_and_every_option_has_a_table() -> None:
    from podtune.bench.case.command_line import parser
    from podtune.sft.config.keys import known_keys

    page = (ROOT / "docs/configuration.md").read_text()
    options = [action.option_strings[0] for action in parser()._actions if action.dest != "help"]
    assert [name for name in (*known_keys(), *options) if f"| `{name}` |" not in page] == []


def test_every_variable_of_podtunes_own_is_in_one_table() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    table = page.partition("### podtune's own variables")[2].partition("###")[0]
    places = ("training", "charts", "scripts", "Makefile", "Dockerfile", "tests/chaos")
    files = [
        path for place in places for path in [ROOT / place, *(ROOT / place).rglob("*")] if path.is_file()
    ]
    named = {
        name
        for path in files
        if path.suffix != ".pyc"
        for name in re.findall(r"\bPODTUNE_[A-Z_]+\b", path.read_text(errors="replace"))
    }
    assert set(re.findall(r"`(PODTUNE_[A-Z_]+)`", table)) == named


def test_no_line_of_the_readme_is_wider_than_a_window() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if len(line) > 120] == []


def test_every_exit_code_is_explained() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    table = page.partition("## Exit codes")[2].partition("##")[0]
    listed = {
        int(code) for row in re.findall(r"^\| ([\d, ]+) \|", table, re.MULTILINE) for code in row.split(",")
    }
    known = {value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}
    from podtune.pod.retries import EXHAUSTED

    assert known | {EXHAUSTED} <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name + "/" + page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)", text):
        path, anchor = target
        if "://" in path:
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {path}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name}: #{anchor}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.parent.name + "/" + page.name
)
def test_files_and_tests_that_a_page_names_are_there(page: Path) -> None:
    text = PART.sub("", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL))
    names = [name for name in re.findall(r"`([^`\n]+)`", text) if "NAME" not in name and "DIR" not in name]
    tests = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in names if re.fullmatch(r"test_\w+", name) and name not in tests] == []
    bases = (ROOT, ROOT / "training/podtune", ROOT / "charts/podtune")
    rooms = {path.name for base in bases for path in base.iterdir() if path.is_dir()} - {"final", "demo"}
    paths = [name for name in names if re.fullmatch(r"[\w.-]+(/[\w.-]+)+/?", name)]
    missing = [
        name
        for name in paths
        if name.partition("/")[0] in rooms
        and not any((base / name).exists() or (base / f"{name}.py").exists() for base in bases)
    ]
    assert missing == []


def test_every_claim_of_the_reference_has_a_place_and_something_that_shows_it() -> None:
    """podtune's commands are held by the test of all documents; here torchrun's, make's and the tests."""
    from podtune.bench.case.command_line import read_options
    from podtune.run.world import World

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    page = (ROOT / "docs/reference.md").read_text().partition("## Untested")[0]
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    claims = [row for row in rows if row[0] != "claim"]
    assert len(claims) > 20
    for claim, where, shown in claims:
        for path in re.findall(r"`((?:bench|deploy|benchmarks)/[^`]+)`", where):
            assert any((base / path).exists() for base in (ROOT, ROOT / "training/podtune")), claim
        for command in re.findall(r"`([^`]+)`", shown):
            program, *words = command.split()
            if program == "make":
                assert words[0] in targets, command
            elif program.startswith("tests/"):
                assert (ROOT / program).is_file(), command
            elif "podtune.benchmark" in words and "--help" not in words:
                ranks = int(words[words.index("--nproc-per-node") + 1])
                read_options(words[words.index("podtune.benchmark") + 1 :], World(world_size=ranks))
            else:
                assert program == "podtune" or command.startswith("python -m podtune."), command
        assert shown.startswith("`"), claim
        assert re.search(r"`|\]\(", where), claim


def test_the_lists_of_requirements_name_extras_that_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lists = sorted((ROOT / "requirements").iterdir())
    assert [path.stem for path in lists] == ["bench", "rocm", "train"]
    for path in lists:
        lock, wanted = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert (path.parent / lock.removeprefix("-c ")).resolve() == ROOT / "requirements.txt"
        assert set(wanted.removeprefix(".[").removesuffix("]").split(",")) <= set(extras), path.name


def test_the_manifests_of_the_how_to_are_what_kubernetes_takes() -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs/how-to.md").read_text(), re.DOTALL | re.MULTILINE
    )
    documents = [document for block in blocks for document in yaml.safe_load_all(block)]
    core = [document for document in documents if ".x-k8s.io" not in document["apiVersion"]]
    assert len(core) >= 6
    for document in core:
        if document["kind"] == "InferenceService":  # its model is a container, with four fields more
            model = document["spec"]["predictor"]["model"]
            assert {"modelFormat", "storageUri"} <= set(model)
            fields = {"modelFormat", "storageUri", "protocolVersion", "runtime"}
            container = {"name": "model"} | {key: model[key] for key in set(model) - fields}
            document |= {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container]}}
        kubernetes_validate.validate(document, "1.34", strict=True)


PART = re.compile(r"<!-- generated.*?<!-- end -->", re.DOTALL)


def command_lines(text: str) -> list[str]:
    """Lines of code blocks, and code in a sentence, that begin with podtune."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(
        r"`(podtune [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    lines = [line.split(" #")[0].split("&&")[-1].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("podtune ")] + spans


def with_its_commands(page: Path) -> str:
    """A page's text; of a notebook the shell lines."""
    text = page.read_text()
    if page.suffix != ".ipynb":
        return text
    lines = [line for cell in json.loads(text)["cells"] for line in cell["source"] if line.startswith("!")]
    return "```\n" + "".join(line[1:].rstrip() + "\n" for line in lines) + "```\n"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "docs/notebook.ipynb"], ids=lambda page: page.parent.name + "/" + page.name
)
def test_every_podtune_command_in_the_documents_exists_with_its_options(page: Path) -> None:
    from podtune.cli import app
    from podtune.sft.config.keys import known_keys

    top: Any = typer.main.get_command(app)
    nowhere = click.Context(top)
    for line in command_lines(with_its_commands(page)):
        command = top
        words = line.split()[1:]
        while isinstance(command, click.Group) and words and re.fullmatch(r"[a-z][a-z0-9-]*", words[0]):
            assert words[0] in command.list_commands(nowhere), line
            command = command.get_command(nowhere, words.pop(0))
        options = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        if command.name in ("train", "inspect", "prepare"):  # take the keys of a fine-tune, too
            options |= {"--config", *(f"--{key}" for key in known_keys())}
        words = words[: words.index("--")] if "--" in words else words
        given = [
            word.strip("[],.").partition("=")[0]
            for word in words
            if word.strip("[").startswith("-") and len(word) > 1
        ]
        assert not [option for option in given if option not in options | {"-h", "--help"}], line


A_VALUE = re.compile(r"[\w=.-]+(:|,| or | \()")  # that the option takes


def commands_of(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands_of(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def test_the_help_of_all_commands_is_of_one_style() -> None:
    from podtune.cli import app

    for path, command in commands_of(typer.main.get_command(app), "podtune"):
        for parameter in command.params:
            text = getattr(parameter, "help", None) or ""
            where = f"{path} {parameter.opts[0]}: {text}"
            assert text or not isinstance(parameter, click.Option), where
            assert not text or text.endswith("."), where
            assert not text[:1].islower() or A_VALUE.match(text), where
        examples = (command.help or "").partition("\b\n")[2]
        assert not examples or examples.startswith("Examples:\n  "), path


def test_workflows_name_actions_by_commit() -> None:
    """A tag can be moved to other code."""
    files = [*(ROOT / ".github" / "workflows").iterdir(), ROOT / "action.yml"]
    used = [line for file in files for line in re.findall(r"uses: *(.*)", file.read_text(encoding="utf-8"))]
    assert used
    assert [line for line in used if not re.fullmatch(r"\S+@[0-9a-f]{40} +# v\S+", line)] == []
