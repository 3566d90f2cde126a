"""podtune lint as a linter of a repository: what is read, what is left out, and when it fails."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.lint_examples import main, merged

from podtune.cluster.lint.explain import examples
from podtune.run.errors import UserError

GOOD = examples()["base"]
BAD = GOOD.replace("name: run", "name: Run")
WARNED = GOOD.replace("train:1.0", "train:latest")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".git").mkdir()  # the root of a repository
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


def codes(content: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in content["findings"]}


def test_a_rule_is_ignored_by_flag_and_by_annotation(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").write_text(WARNED)
    assert codes(found(capsys, "job.yaml")[1]) == {"PT402"}
    assert codes(found(capsys, "job.yaml", "--ignore", "pt402,PT204")[1]) == set()
    reason = {"metadata": {"annotations": {"lint.podtune/ignore": "PT402: built each night"}}}
    (folder / "silent.yaml").write_text(yaml.safe_dump(merged(yaml.safe_load(WARNED), reason)))
    code, content = found(capsys, "silent.yaml")
    assert (code, codes(content), content["ignored"]) == (0, set(), 1)
    with pytest.raises(UserError, match="'PT999' is not a rule"):
        main(["job.yaml", "--ignore", "PT999"])


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        (BAD, [], 65),
        (BAD, ["--fail-on", "never"], 0),
        (WARNED, [], 0),
        (WARNED, ["--fail-on", "warning"], 65),
        ("kind: ConfigMap\n", [], 0),
        ("kind: ConfigMap\n", ["--fail-if-none"], 65),
    ],
)
def test_the_exit_code_is_what_was_asked_for(
    text: str, words: list[str], expected: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").write_text(text)
    assert main(["job.yaml", *words]) == expected
    assert ("no PyTorchJob, TrainJob, distributed Job or runtime in job.yaml" in capsys.readouterr().err) == (
        "Map" in text
    )


def test_directories_and_globs_are_read_but_for_what_is_no_object(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "a/job.yaml": BAD,
        "a/b/job.json": json.dumps(yaml.safe_load(BAD)),
        "a/readme.md": BAD,
        "a/other.yaml": "a: [",
        "a/.hidden/job.yaml": BAD,
        "a/overlay/kustomization.yaml": "patches: [{path: patch.yaml}]",
        "a/overlay/patch.yaml": "kind: PyTorchJob\nmetadata: {name: run}\n",
        "a/chart/Chart.yaml": "name: x",
        "a/chart/templates/job.yaml": "kind: PyTorchJob\nmetadata: {name: {{ .Release.Name }}}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    content = found(capsys, "a")[1]
    assert [finding["source"] for finding in content["findings"]] == ["a/b/job.json", "a/job.yaml"]
    assert len(found(capsys, "a/**/job.*")[1]["jobs"]) == 2


@pytest.mark.parametrize("kind", ["List", "PyTorchJobList"])
def test_jobs_are_found_in_lists_of_lists(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inner = {"apiVersion": "v1", "kind": kind, "items": [yaml.safe_load(GOOD)]}
    (folder / "x.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [inner]}))
    assert found(capsys, "x.yaml")[1]["jobs"] == ["PyTorchJob run"]


def test_the_target_decides_what_a_trainjob_may_hold(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = yaml.safe_load(Path(__file__).with_name("jobs_that_run.yaml").read_text())
    (folder / "t.yaml").write_text(shapes["trainjob-2.1-overrides"])
    assert "PT002" not in codes(found(capsys, "t.yaml")[1])
    assert "PT002" in codes(found(capsys, "t.yaml", "--target", "trainer=2.3")[1])
    assert "PT002" not in codes(found(capsys, "t.yaml", "--target", "trainer=v2.1.0,operator=1.9")[1])
    with pytest.raises(UserError, match="does not know 'trainer=3'"):
        main(["t.yaml", "--target", "trainer=3"])


def test_sarif_names_file_line_and_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "job.yaml").write_text(BAD)
    main(["job.yaml", "--format", "sarif"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (result,) = run["results"]
    location = result["locations"][0]["physicalLocation"]
    assert (result["ruleId"], result["level"], location["region"]["startLine"]) == ("PT010", "error", 4)
    assert result["ruleId"] in {rule["id"] for rule in run["tool"]["driver"]["rules"]}


def test_github_gets_no_file_for_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    main(["-", "--format", "github"])
    assert capsys.readouterr().out.startswith("::error title=PT010::")


def test_a_job_that_runs_well_is_a_dozen_lines_at_most(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = yaml.safe_load(Path(__file__).with_name("jobs_that_run.yaml").read_text())
    for text in shapes.values():
        (folder / "job.yaml").write_text(text)
        main(["job.yaml"])
        assert len(capsys.readouterr().out.splitlines()) <= 12


def test_explain_takes_a_code_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--explain", "pt301"]) == 0
    assert "Bad:" in capsys.readouterr().out


def test_github_shows_notes_on_demand_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    noted = merged(yaml.safe_load(GOOD), {"spec": {"runPolicy": {"cleanPodPolicy": None}}})
    (folder / "job.yaml").write_text(yaml.safe_dump(noted))
    main(["job.yaml", "--format", "github"])
    assert capsys.readouterr().out == ""
    main(["job.yaml", "--format", "github", "--notes"])
    assert capsys.readouterr().out.startswith("::notice file=job.yaml,line=")


def test_a_file_without_any_of_the_kinds_may_be_what_it_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {
        "mkdocs.yml": "slugify: !!python/name:pymdownx.slugs.slugify\n",
        "tsconfig.json": '{"strict": true, // as agreed\n}',
        "patch.yaml": "kind: PyTorchJob\nmetadata: {name: run}\n",
        "kustomization.yaml": "patches: [{path: patch.yaml}]",
    }.items():
        (folder / name).write_text(text)
    assert found(capsys, "mkdocs.yml", "tsconfig.json", "patch.yaml")[1]["findings"] == []
    (folder / "job.yaml").write_text("kind: PyTorchJob\na: [")
    assert codes(found(capsys, "job.yaml")[1]) == {"PT001"}


def test_a_missing_file_alone_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="No such file"):
        main(["nope.yaml"])
    assert capsys.readouterr().out == ""


def test_a_variable_in_a_flow_mapping_is_not_judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    volume = "{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}"
    assert volume in GOOD
    text = GOOD.replace("sizeLimit: 8Gi", "sizeLimit: ${SHM_SIZE}")
    (folder / "job.yaml").write_text(text.replace("backoffLimit: 3", "backoffLimit: ${TRIES}"))
    assert codes(found(capsys, "job.yaml")[1]) == {"PT008"}


def test_programs_that_differ_after_their_first_line_are_the_same_and_others_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def judged(last: str) -> list[dict[str, Any]]:
        job = yaml.safe_load(GOOD)
        for role, line in (("Master", "import torch\nprint('master')"), ("Worker", last)):
            spec = job["spec"]["pytorchReplicaSpecs"][role] = json.loads(
                json.dumps(job["spec"]["pytorchReplicaSpecs"][role])
            )
            spec["template"]["spec"]["containers"][0]["command"] = ["python", "-c", line]
        job["spec"]["nprocPerNode"] = "1"
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        return [one for one in found(capsys, "job.yaml")[1]["findings"] if one["code"] == "PT111"]

    assert judged("import torch\nprint('worker')") == []
    (finding,) = judged("import evaluate")
    assert "Master: python import torch, Worker: python import evaluate" in finding["message"]


def test_an_unknown_code_is_answered_with_the_codes_there_are() -> None:
    with pytest.raises(UserError) as error:
        main(["--explain", "PT9999"])
    assert "PT001, PT002" in error.value.fix
