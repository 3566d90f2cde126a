"""podtune lint finds what breaks jobs after they were accepted, says where, and lets good jobs pass."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from support.lint_examples import example, merged

from podtune.cluster.lint.check import lint
from podtune.cluster.lint.explain import examples, explanation
from podtune.cluster.lint.output import as_github, as_json, as_text
from podtune.cluster.lint.rules import RULES
from podtune.cluster.lint.schema import SchemaCheck, schema
from podtune.cluster.lint.sources import read_sources
from podtune.run.errors import UserError
from scripts.build_lint_docs import reference

Json = dict[str, Any]
CODES = [rule.code for rule in RULES]
ROOT = Path(__file__).parents[3]


def codes(text: str) -> set[str]:
    return {finding.code for finding in lint([("job.yaml", text)]).findings}


def base() -> Json:
    job: Json = yaml.safe_load(examples()["base"])
    return job


def with_change(**change: Any) -> str:
    return yaml.safe_dump(merged(base(), change))


def worker(**pod: Any) -> Json:
    return {"pytorchReplicaSpecs": {"Worker": {"template": {"spec": pod}}}}


def container(**fields: Any) -> Json:
    return worker(containers=[{"name": "pytorch", **fields}])


@pytest.mark.parametrize("kind", ["base", "trainjob"])
def test_the_good_jobs_have_no_findings(kind: str) -> None:
    assert lint([("job.yaml", examples()[kind])]).findings == []


@pytest.mark.parametrize("code", CODES)
def test_each_rule_finds_its_bad_example_and_passes_its_good_one(code: str) -> None:
    assert code in codes(example(code, "bad"))
    assert code not in codes(example(code, "good"))


def test_every_rule_has_a_line_of_documentation_a_fix_and_examples() -> None:
    assert {key for key in examples() if key.startswith("PT")} == set(CODES)
    assert len(CODES) == len(set(CODES))
    for rule in RULES:
        assert rule.summary.endswith("."), rule.code
        assert rule.fix, rule.code


def test_the_reference_page_is_what_the_rules_say() -> None:
    assert (ROOT / "docs/lint.md").read_text() == reference(), "run: python scripts/build_lint_docs.py"


def test_a_misspelt_field_is_named_with_its_neighbour_line_and_path() -> None:
    text = (
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: a}\nspec:\n  nprocPerNod: '1'\n"
        + yaml.safe_dump({"x": base()["spec"]["pytorchReplicaSpecs"]})
        .replace("x:", "  pytorchReplicaSpecs:", 1)
        .replace("\n  ", "\n    ")
    )
    finding = next(one for one in lint([("j.yaml", text)]).findings if one.code == "PT002")
    assert (finding.line, finding.path) == (5, "spec.nprocPerNod")
    assert "did you mean 'nprocPerNode'" in finding.message


def test_an_unquoted_number_says_how_to_quote_it_and_is_one_finding() -> None:
    (finding,) = lint([("j.yaml", with_change(spec={"nprocPerNode": 2}))]).findings
    assert (finding.code, finding.fix) == ("PT003", 'quote it: nprocPerNode: "2"')


def test_a_boolean_annotation_and_a_fraction_of_a_cpu_are_wrong_types() -> None:
    assert "PT003" in codes(
        with_change(
            spec={"pytorchReplicaSpecs": {"Worker": {"template": {"metadata": {"annotations": {"a": True}}}}}}
        )
    )
    assert "PT003" in codes(with_change(spec=container(resources={"limits": {"cpu": 1.5}})))


def test_yaml_errors_have_their_line_and_a_template_is_recognised() -> None:
    (finding,) = lint([("-", "a: 1\nb:\n\t- c\n")]).findings
    assert (finding.code, finding.line) == ("PT001", 3)
    (template,) = lint([("-", "a: 1\nb: {{ .Values.b }}\n  c: 2\n")]).findings
    assert "render it first" in template.fix
    (twice,) = lint([("-", "kind: ConfigMap\nkind: Secret\n")]).findings
    assert (twice.line, twice.message) == (2, "'kind' is given twice; the last one wins")


def test_documents_before_a_broken_one_are_still_checked() -> None:
    verdict = lint([("j.yaml", with_change(spec={"nprocPerNode": "0"}) + "---\na: [\n")])
    assert {"PT005", "PT001"} <= {finding.code for finding in verdict.findings}


def test_all_jobs_of_several_documents_and_lists_are_checked() -> None:
    two = yaml.safe_dump(
        {"apiVersion": "v1", "kind": "List", "items": [base(), merged(base(), {"metadata": {"name": "Bad"}})]}
    )
    verdict = lint([("j.yaml", two)])
    assert verdict.jobs == ["PyTorchJob run", "PyTorchJob Bad"]
    assert {finding.code for finding in verdict.findings} == {"PT010"}


def test_a_misspelt_kind_is_not_passed_over() -> None:
    assert codes(with_change(kind="PytorchJob")) == {"PT006"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["torchrun", "train.py"], set()),
        (["python", "-m", "torch.distributed.run", "train.py"], set()),
        (["tini", "-g", "--", "torchrun", "train.py"], set()),
        (["/opt/venv/bin/podtune", "launch", "--", "-m", "podtune.training"], set()),
        (["bash", "-c", "set -e\nsource env.sh\nexec torchrun train.py"], set()),
        (["python3.11", "train.py"], {"PT104"}),
        (["bash", "-ec", "cd /app && python -u train.py"], {"PT104"}),
        (["/bin/sh", "-c", "pip install x && torchrun train.py | tee log"], {"PT107"}),
        (["/bin/sh", "-c", "trap 'kill -TERM $pid' TERM; torchrun train.py & pid=$!; wait $pid"], set()),
        (["tini", "-g", "--", "bash", "-c", "cd /app; torchrun train.py"], set()),
        (["bash", "-c", "torchrun train.py"], set()),
        (["nsys", "profile", "-o", "x", "torchrun", "--nnodes=1", "train.py"], {"PT105"}),
        (["uv", "run", "--no-sync", "deepspeed", "train.py"], {"PT106"}),
        (["torchrun", "--nnodes", "1", "train.py"], {"PT105"}),
        (["torchrun", "--node_rank=0", "--master_addr=run-master-0", "train.py"], {"PT105"}),
        (
            [
                *("torchrun", "--nnodes=$(PET_NNODES)", "--node_rank=$(RANK)"),
                *("--master_addr=$(MASTER_ADDR)", "--master_port=$(MASTER_PORT)", "train.py"),
            ],
            set(),
        ),
        (["bash", "-c", "torchrun --node_rank=$PET_NODE_RANK --master_addr=$MASTER_ADDR train.py"], set()),
        (["torchrun", "train.py", "--nnodes=1"], set()),
        (["deepspeed", "train.py"], {"PT106"}),
        (["python", "-m", "accelerate.commands.launch", "train.py"], {"PT106"}),
        (["./start.sh"], set()),
    ],
)
def test_launchers_are_recognised_through_shells_and_wrappers(command: list[str], expected: set[str]) -> None:
    assert codes(yaml.safe_dump(started_by(command))) == expected


def started_by(command: list[str]) -> Json:
    """The good job with this command in both pods."""
    job = base()
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["template"]["spec"]["containers"][0]["command"] = command
    return job


def test_plain_python_is_fine_for_one_process() -> None:
    change = {
        "nprocPerNode": "1",
        "pytorchReplicaSpecs": {"Worker": None, "Master": {"template": {"spec": {}}}},
    }
    one = merged(base(), {"spec": change})
    main = one["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    main |= {"command": ["python", "train.py"], "resources": {"limits": {"nvidia.com/gpu": 1}}}
    assert lint([("j", yaml.safe_dump(one))]).findings == []


@pytest.mark.parametrize(
    "env",
    [
        {"name": "TOKENIZERS_PARALLELISM", "value": "false"},
        {"name": "EOS_TOKEN", "value": "<|im_end|>"},
        {"name": "HF_TOKEN_PATH", "value": "/run/secrets/hf"},
        {"name": "WANDB_API_KEY", "value": ""},
        {"name": "CACHE_KEY", "value": "my-cache-name"},
        {"name": "PROXY", "value": "http://proxy:3128/?page=2"},
    ],
)
def test_ordinary_variables_are_not_taken_for_secrets(env: Json) -> None:
    assert "PT403" not in codes(with_change(spec=container(env=[env])))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            (name, "plainvalue12345")
            for name in (
                "AZURE_STORAGE_KEY",
                "AZURE_STORAGE_CONNECTION_STRING",
                "PGPASSWORD",
                "SLACK_WEBHOOK",
            )
        ),
        ("DATA", "https://account.blob.core.windows.net/c/x?sv=1&sig=abcdef"),
    ],
)
def test_a_variable_that_holds_a_secret_is_found(name: str, value: str) -> None:
    assert "PT403" in codes(with_change(spec=container(env=[{"name": name, "value": value}])))


def test_a_token_in_the_command_is_found() -> None:
    assert "PT403" in codes(with_change(spec=container(args=["--token", "hf_abcdefghijklmnopqrstuvwxyz"])))


@pytest.mark.parametrize("junk", [None, 3, "x", [], {}, [1], {"a": [None]}])
@pytest.mark.parametrize(
    "place",
    ["metadata", "spec", "spec.pytorchReplicaSpecs", "spec.pytorchReplicaSpecs.Master", "kind", "template"],
)
def test_no_shape_of_nonsense_raises(junk: Any, place: str) -> None:
    manifest = base()
    if place == "template":
        manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"] = {
            "containers": junk,
            "volumes": junk,
        }
    else:
        target = manifest
        *parents, last = place.split(".")
        for key in parents:
            target = target[key]
        target[last] = junk
    lint([("j.yaml", yaml.safe_dump(manifest))])
    train = yaml.safe_load(examples()["trainjob"])
    train["spec"]["trainer"] = {
        "command": junk,
        "env": junk,
        "numNodes": junk,
        "resourcesPerNode": junk,
        "image": junk,
    }
    lint([("t.yaml", yaml.safe_dump(train))])
    lint([("t.yaml", yaml.safe_dump(train | {"spec": junk}))])


def broken_jobs() -> list[Json]:
    jobs = [base()]
    for change in (
        {"spec": {"nprocPerNode": 1}},
        {"spec": container(env=[{"value": "x"}])},
        {"spec": container(ports=[{"containerPort": "x"}])},
        {"spec": worker(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "8 GB"}}])},
        {"spec": {"runPolicy": {"backoffLimit": 2.5, "suspend": "yes"}}},
        {"metadata": {"labels": {"a": 1}}, "extra": {}},
        {"status": {"anything": [1]}},
    ):
        jobs.append(merged(base(), change))
    return jobs


@pytest.mark.parametrize("manifest", broken_jobs())
def test_the_schema_check_agrees_with_the_jsonschema_library(manifest: Json) -> None:
    checked = SchemaCheck()
    checked.cleaned(copy.deepcopy(manifest), schema("pytorchjob-1.9"))
    theirs = set()
    for error in jsonschema.Draft202012Validator(schema("pytorchjob-1.9")).iter_errors(manifest):
        theirs.add((tuple(error.absolute_path), error.validator))
    keywords = {"PT002": "additionalProperties", "PT003": "type", "PT004": "required", "PT005": "pattern"}
    ours = {
        (one.place if one.code in ("PT003", "PT005") else one.place[:-1], keywords[one.code])
        for one in checked.found
        if one.code in keywords
    }
    assert ours == theirs


def test_text_json_and_github_say_the_same() -> None:
    verdict = lint([("a,b.yaml", with_change(spec={"nprocPerNode": 2}))])
    assert "a,b.yaml:" in as_text(verdict)
    assert "1 error, 0 warnings" in as_text(verdict)
    content = json.loads(as_json(verdict))
    assert (content["schema"], content["errors"], content["findings"][0]["code"]) == (
        "podtune.lint/1",
        1,
        "PT003",
    )
    assert as_github(verdict).startswith("::error file=a%2Cb.yaml,line=")


def test_an_unknown_code_is_answered_with_its_neighbour() -> None:
    assert "torchrun" in explanation("PT104")
    with pytest.raises(UserError, match="PT104"):
        explanation("PT1004")


def run(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "podtune.cli", "lint", *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_the_command_exits_0_when_clean_and_65_on_errors_and_66_without_the_file(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text(examples()["base"])
    assert run(str(good)).returncode == 0
    assert run("-", text=with_change(spec={"nprocPerNode": 2})).returncode == 65
    missing = run(str(tmp_path / "none.yaml"))
    assert (missing.returncode, "No such file" in missing.stderr) == (66, True)


def test_lint_imports_nothing_heavy_and_is_quick() -> None:
    heavy = "('torch', 'jsonschema', 'kubernetes', 'rich')"
    script = (
        "import sys, podtune.cli as program; sys.argv = ['podtune', 'lint', '-']\n"
        "try: program.main()\n"
        f"except SystemExit: print([name for name in {heavy} if name in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, input=examples()["base"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.splitlines() == ["PyTorchJob run: 0 errors, 0 warnings, 0 notes", "[]"]
    started = time.process_time()
    lint([("job.yaml", examples()["base"])])
    assert time.process_time() - started < 0.05  # seconds of CPU; the start of python comes on top


def test_a_kind_of_another_operator_s_group_is_not_judged_and_a_misspelt_group_is() -> None:
    assert codes(with_change(apiVersion="training.kubedl.io/v1alpha1", spec={"nprocPerNode": 2})) == set()
    assert "PT006" in codes(with_change(apiVersion="kubeflow.or/v1"))


@pytest.mark.parametrize("flags", [["--node_rank=0"], ["--master_addr=x", "--node_rank=0"]])
def test_torchrun_ignores_the_flags_of_a_static_rendezvous_in_an_elastic_job(flags: list[str]) -> None:
    job = merged(
        started_by(["torchrun", *flags, "train.py"]), {"spec": {"elasticPolicy": {"maxReplicas": 2}}}
    )
    assert "PT105" not in codes(yaml.safe_dump(job))
    static = merged(
        job, {"spec": container(command=["torchrun", "--rdzv-backend=static", *flags, "train.py"])}
    )
    assert "PT105" in codes(yaml.safe_dump(static))


def test_a_variable_for_the_bounds_of_an_elastic_job_is_not_judged_by_them() -> None:
    elastic = {"minReplicas": 2, "maxReplicas": "$NUM_NODES"}
    found = codes(with_change(spec={"elasticPolicy": elastic, "pytorchReplicaSpecs": {"Master": None}}))
    assert "PT008" in found
    assert "PT110" not in found


def test_an_argument_that_is_a_number_is_named_by_its_list() -> None:
    (finding,) = lint(
        [("j.yaml", yaml.safe_dump(started_by(["torchrun", "train.py", "--lr", 0.5])))]
    ).findings  # type: ignore[list-item]
    assert finding.message.startswith("command[3] is a number")
    assert finding.fix == 'quote it: - "0.5"'


def test_a_command_of_blanks_is_judged_without_a_traceback() -> None:
    job = merged(base(), {"spec": container(command=None, args=["", " "])})
    assert "PT111" in codes(yaml.safe_dump(job))


def test_a_job_counts_where_its_pods_are_one_training_and_an_array_of_trainings_is_left_in_peace() -> None:
    job = example("PT601", "good")
    assert lint([("job.yaml", job)]).jobs == ["Job run"]
    assert not lint([("job.yaml", job)]).findings
    for other in (
        job.replace("torchrun --nnodes=2", "render").replace("-m podtune.training", ""),  # no torch
        job.replace("batch/v1", "batch.example.com/v1"),
    ):
        assert lint([("job.yaml", other)]).empty
    alone = job.replace(
        "--nnodes=2 --node-rank=$JOB_COMPLETION_INDEX --master-addr=run-0.run", "--standalone"
    )
    assert not lint([("job.yaml", alone.replace("parallelism: 2", "parallelism: 1"))]).findings
    wrong = job.replace("completions: 2", "completion: 2").replace("run-0.run", "run-0.other")
    assert codes(wrong) == {"PT002", "PT603"}
    assert codes(job.replace("nnodes=2", "nnodes=3").replace("name: run", "name: Run")) == {"PT010", "PT112"}


def test_other_programs_files_that_have_a_job_are_left_in_peace(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("kind: Job\nspec: [\n{% endfor %}\n")
    (tmp_path / "jobs.yaml").write_text("kind: jobs\nname: nightly\n")
    assert read_sources([str(tmp_path)]) == []
    assert not lint(
        [("a", "kind: job\nname: nightly\n"), ("b", (tmp_path / "job.yaml").read_text())]
    ).findings
    for spec in ("[]", "torchrun", "{parallelism: '2'}", "{parallelism: []}"):  # no Job, and no traceback
        assert lint([("c", f"apiVersion: batch/v1\nkind: Job\nspec: {spec}\n")]).empty
    wrong = "{completions: two, parallelism: 2, template: [torchrun]}"
    assert {"PT003", "PT004"} <= codes(f"apiVersion: batch/v1\nkind: Job\nspec: {wrong}\n")
