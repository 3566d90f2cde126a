"""Values that cannot work are refused with the path, what is wrong and the fix, and nothing is rendered."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from support.chart import render

from podtune.cluster.chart.render import CHART, merged_values
from podtune.run.errors import UserError

SHARED = [f"persistence.{volume}.accessModes={{ReadWriteMany}}" for volume in ("models", "data", "output")]


def refusal(*sets: str, name: str = "run") -> UserError:
    with pytest.raises(UserError) as caught:
        render([], list(sets), name, engine="python")
    return caught.value


@pytest.mark.parametrize(
    ("sets", "where", "says"),
    [
        (["distributed.node=2"], "distributed.node", "unknown key"),
        (["persistence.output.sise=3Gi"], "persistence.output.sise", "unknown key"),
        (["runPolicy.backofflimit=1"], "runPolicy.backofflimit", "unknown key"),
        (["mode=train"], "mode", "one of ['sft', 'benchmark']"),
        (["api=pods"], "api", "one of ['pytorchjob', 'trainjob', 'job']"),
        (["distributed.nodes=0"], "distributed.nodes", "less than the minimum of 1"),
        (["distributed.nprocPerNode=gpu"], "distributed.nprocPerNode", "integer"),
        (["distributed.nprocPerNode=0"], "distributed.nprocPerNode", "less than the minimum of 1"),
        (["distributed.strategy=dpp"], "distributed.strategy", "'ddp'"),
        (["distributed.strategy=pipeline-1f1b"], "distributed.strategy", "is not one of"),
        (["nccl.preset=infiniband"], "nccl.preset", "'rdma'"),
        (["nccl.env.MASTER_ADDR=x"], "nccl.env", "MASTER_ADDR"),
        (["nccl.env.PODTUNE_BUS_GB_PER_S=fast"], "nccl.env.PODTUNE_BUS_GB_PER_S", "fast"),
        (["image.tag=latest"], "image.tag", "latest"),
        (["image.repository="], "image.repository", "non-empty"),
        (["image.digest=abc"], "image.digest", "does not match"),
        (["port=80"], "port", "less than the minimum of 1024"),
        (["resources.limits.memory=4GB"], "resources.limits.memory", "4GB"),
        (["persistence.models.size=20"], "persistence.models.size", "20"),
        (["persistence.data.accessModes={RWX}"], "persistence.data.accessModes[0]", "ReadWriteMany"),
        (["persistence.models.mountPath=models"], "persistence.models.mountPath", "models"),
        (["restartPolicy=Always"], "restartPolicy", "ExitCode"),
        (["runPolicy.cleanPodPolicy=Nothing"], "runPolicy.cleanPodPolicy", "'Running'"),
        (["runPolicy.managedBy=me"], "runPolicy.managedBy", "kueue"),
        (["benchmark.preset=quick"], "benchmark.preset", "'smoke'"),
        (["prepare.build=huge"], "prepare.build", "'tiny'"),
        (["shm.sizeLimit=big"], "shm.sizeLimit", "big"),
        (["config.max_steps=20"], "config", "text block"),
        (["persistence=null"], "values", "'persistence' is a required property"),
        (["priorityClassName=x\nhostPID: true"], "priorityClassName", "does not match"),
        (
            ["persistence.data.existingClaim=c\n  hostPath: {path: /}"],
            "persistence.data.existingClaim",
            "does not match",
        ),
        (["persistence.data.storageClass=a b"], "persistence.data.storageClass", "does not match"),
        (["persistence.data.mountPath=/data\nx: y"], "persistence.data.mountPath", "does not match"),
        (["persistence.data.mountPath=/data/.."], "persistence.data.mountPath", "does not match"),
        (["image.pullSecrets={a b}"], "image.pullSecrets[0]", "does not match"),
        (["image.repository=x y"], "image.repository", "does not match"),
        (["kueue.queueName=q\nx: y"], "kueue.queueName", "does not match"),
        (["nameOverride=a\nb: c"], "nameOverride", "does not match"),
        (["serviceAccount.name=a: b"], "serviceAccount.name", "does not match"),
        (["hfToken.existingSecret=A"], "hfToken.existingSecret", "does not match"),
    ],
)
def test_the_schema_refuses(sets, where, says):
    error = refusal(*sets)
    assert error.where == where
    assert says in str(error)


@pytest.mark.parametrize(
    ("sets", "where", "says"),
    [
        (["api=trainjob", "hostNetwork=true"], "hostNetwork", "use api job or pytorchjob"),
        (["api=trainjob", "priorityClassName=high"], "priorityClassName", "use api job or pytorchjob"),
        (
            ["api=job", "distributed.elastic.maxNodes=2"],
            "distributed.elastic.maxNodes",
            "use api pytorchjob",
        ),
        (["api=trainjob", "runPolicy.backoffLimit=9"], "runPolicy.backoffLimit", "installed runtime"),
        (
            ["api=trainjob", "runPolicy.ttlSecondsAfterFinished=60"],
            "runPolicy.ttlSecondsAfterFinished",
            "installed runtime",
        ),
        (["api=trainjob", "runPolicy.cleanPodPolicy=All"], "runPolicy.cleanPodPolicy", "use api pytorchjob"),
        (["api=job", "runPolicy.schedulingPolicy.queue=q"], "runPolicy.schedulingPolicy", "api pytorchjob"),
        (["api=job", "runPolicy.managedBy=kubeflow.org/training-operator"], "runPolicy.managedBy", "api"),
        (["api=trainjob", "restartPolicy=Never"], "restartPolicy", "installed runtime"),
        (["api=trainjob", "image.pullPolicy=Always"], "image.pullPolicy", "installed runtime"),
        (["api=trainjob", "port=24000"], "port", "installed runtime"),
        (
            ["hostNetwork=true", "distributed.elastic.maxNodes=2"],
            "hostNetwork",
            "runs code for whoever reaches it",
        ),
        (["mode=benchmark", "distributed.strategy=ddp"], "distributed.strategy", "benchmark.preset"),
        (["mode=benchmark", "api=trainjob"], "api", "as a PyTorchJob"),
        (
            ["distributed.strategy=single", "distributed.nprocPerNode=2"],
            "distributed.nprocPerNode",
            "one process",
        ),
    ],
)
def test_the_schema_refuses_combinations_that_cannot_work(sets, where, says):
    error = refusal(*sets)
    assert error.where == where
    assert says in str(error)


@pytest.mark.parametrize(
    ("sets", "where", "says"),
    [
        (["distributed.nodes=2"], "persistence.models.accessModes", "2 pods share the volume"),
        (["aim.enabled=true"], "persistence.output.accessModes", "the Aim pod share the volume"),
        (
            ["distributed.nodes=2", *SHARED, "distributed.elastic.maxNodes=3"],
            "distributed.elastic.minNodes",
            "not set",
        ),
        (["rbac.create=true"], "rbac.subjects", "nobody"),
        (["distributed.elastic.minNodes=1"], "distributed.elastic.maxNodes", "not set"),
        (
            ["distributed.elastic.minNodes=2", "distributed.elastic.maxNodes=3", *SHARED],
            "distributed.nodes",
            "not between",
        ),
        (["resources.limits.nvidia\\.com/gpu=2"], "distributed.nprocPerNode", "one process a GPU"),
        (["resources.requests.nvidia\\.com/gpu=1"], "resources.requests", "limits says nothing"),
        (["runPolicy.shutdownTimeoutSeconds=290"], "runPolicy.terminationGracePeriodSeconds", "at least 320"),
        (["env[0].name=RANK", "env[0].value=x"], "env", "RANK"),
        (["env[0].name=PET_NNODES", "env[0].value=x"], "env", "PET_NNODES"),
        (["env[0].name=HF_TOKEN", "env[0].value=hf_x"], "env", "plain text"),
        (["env[0].name=AWS_SECRET_ACCESS_KEY", "env[0].value=wJalrXUtnFEMI"], "env", "AWS_SECRET_ACCESS_KEY"),
        (["env[0].name=DB_PASSWD", "env[0].value=hunter22"], "env", "DB_PASSWD"),
        (["env[0].name=gh_pat", "env[0].value=hunter22"], "env", "gh_pat"),
        (["env[0].name=STORE", "env[0].value=https://ada:hunter22@store/x"], "env", "STORE"),
        (["args={--hub_token,abc}"], "args", "hub_token"),
        (["args={--hub_token=abc}"], "args", "hub_token"),
        (["args={--x,hf_abcdefghijklmnopqrst}"], "args", "plain text"),
        (["config=hub_token: abc"], "config", "hub_token"),
        (["config=env: {HF_TOKEN: abc}"], "config", "HF_TOKEN"),
        (["env[0].name=NOTIFY_URL", "env[0].value=https://hooks.example/T0/B0"], "env", "NOTIFY_URL"),
        (["config=model_init_kwargs: {token: abc}"], "config", "token"),
        (["config=dataset_name: https://ada:hunter22@store/x"], "config", "dataset_name"),
        (["config=a: [{b: hf_abcdefghijklmnopqrst}]"], "config", "plain text"),
        (["config=publish: s3://b/x?X-Amz-Signature=abc"], "config", "plain text"),
        (["config=# hf_abcdefghijklmnopqrst"], "config", "plain text"),
        (["nccl.env.NCCL_TOKEN=abc"], "nccl.env", "NCCL_TOKEN"),
        (["podAnnotations.x=hf_abcdefghijklmnopqrst"], "podAnnotations", "plain text"),
        (["mode=benchmark", "benchmark.sweep=x: hf_abcdefghijklmnopqrst"], "benchmark.sweep", "plain text"),
        *(
            ([f"env[0].name={name}", "env[0].value=plainvalue12345"], "env", name)
            for name in (
                *("AZURE_STORAGE_KEY", "AZURE_STORAGE_CONNECTION_STRING", "PGPASSWORD", "OPENAI_KEY"),
                *("SSH_KEY", "SLACK_WEBHOOK", "WEBHOOK_URL", "FOO_BEARER"),
            )
        ),
        (["config=[1"], "config", "not a YAML mapping"),
        (["config=output_dir: /tmp/out"], "config", "lost with the pod"),
        (["config=strategy: fsdp", "distributed.strategy=ddp"], "distributed.strategy", "one place"),
    ],
)
def test_the_templates_refuse(sets, where, says):
    error = refusal(*sets)
    assert error.where == where
    assert says in str(error)
    assert error.fix


def test_what_only_looks_like_a_secret_is_taken():
    config = 'config=eos_token: "<|im_end|>"\npad_token: x'
    sets = [config, "args={--eos_token,</s>}", "env[0].name=HF_TOKEN_PATH", "env[0].value=/run/token"]
    sets += ["env[1].name=CACHE_KEY", "env[1].value=a-name", "env[2].name=X", "env[2].value=http://h/?page=2"]
    assert "PyTorchJob" in render([], sets, "run", engine="python")


def test_what_a_trainjob_leaves_to_its_runtime_is_refused_unless_it_is_the_default():
    """The schema repeats the defaults of values.yaml there, because a chart is never without them."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def constants(node, path=()):
        for key, value in node.get("properties", {}).items():
            if "const" in value:
                yield (*path, key), value["const"]
            yield from constants(value, (*path, key))

    held = dict(constants(schema["allOf"][0]["then"]))
    assert ("runPolicy", "backoffLimit") in held
    for path, value in held.items():
        default = defaults
        for key in path:
            default = default[key]
        assert value == default, path


def test_an_unknown_key_names_the_near_one():
    assert "did you mean 'nodes'?" in refusal("distributed.node=2").fix


@pytest.mark.parametrize(
    ("name", "sets"),
    [("r" * 51, []), ("t" * 49, ["api=trainjob"]), ("j" * 51, ["api=job"]), ("1run", []), ("my.run", [])],
)
def test_a_name_that_pods_cannot_have_is_refused(name, sets):
    assert refusal(*sets, name=name).where == "release name"


@pytest.mark.parametrize(("name", "sets"), [("r" * 50, []), ("t" * 48, ["api=trainjob"])])
def test_the_longest_names_are_taken(name, sets):
    assert name in render([], sets, name, engine="python")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [1", "not YAML"),
        ("- a", "is not a mapping"),
        (None, "cannot read it"),
        (b"\xff\xfe\xff", "not YAML"),
    ],
)
def test_a_values_file_that_cannot_be_used_is_named(tmp_path: Path, text, says):
    file = tmp_path / "my.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        render([file], [], "run", engine="python")
    assert str(file) in caught.value.where
    assert says in str(caught.value)


@pytest.mark.parametrize("expression", ["a", "a={x", "image.tag.x=1,image.tag.x.y=2"])
def test_a_set_that_is_not_key_and_value_is_refused(expression):
    with pytest.raises(UserError):
        render([], [expression], "run", engine="python")


def test_later_files_and_sets_win_maps_merge_and_lists_are_replaced(tmp_path: Path):
    (tmp_path / "a.yaml").write_text("resources: {limits: {cpu: 1, memory: 1Gi}}\nargs: [a, b]\n")
    (tmp_path / "b.yaml").write_text("resources: {limits: {cpu: 2}}\nargs: [c]\n")
    merged = merged_values([tmp_path / "a.yaml", tmp_path / "b.yaml"], ["resources.limits.memory=2Gi"])
    assert merged == {"resources": {"limits": {"cpu": 2, "memory": "2Gi"}}, "args": ["c"]}


def test_set_has_helms_grammar_and_types():
    merged = merged_values([], ["a.b=1,c=true,d={x,2},e=007,f=null", r"nodeSelector.kubernetes\.io/os=x\,y"])
    assert merged == {
        "a": {"b": 1},
        "c": True,
        "d": ["x", 2],
        "e": "007",
        "f": None,
        "nodeSelector": {"kubernetes.io/os": "x,y"},
    }


def test_an_index_changes_one_element_of_a_files_list_and_braces_replace_it(tmp_path: Path):
    file = tmp_path / "a.yaml"
    file.write_text("env: [{name: A, value: a}, {name: B, value: b}]\nargs: [x, y]\n")
    merged = merged_values([file], ["env[1].value=c", "env[2].name=C", "args={z}"])
    assert merged["env"] == [{"name": "A", "value": "a"}, {"name": "B", "value": "c"}, {"name": "C"}]
    assert merged["args"] == ["z"]
