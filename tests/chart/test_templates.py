"""What the chart emits fits what the training operator does with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest
import yaml

from podtune.run.errors import UserError

SHARED = [f"persistence.{volume}.accessModes={{ReadWriteMany}}" for volume in ("models", "data", "output")]
TWO = ["distributed.nodes=2", *SHARED]


def replicas(job):
    return job["spec"]["pytorchReplicaSpecs"]


def pod(job, role="Master"):
    return replicas(job)[role]["template"]["spec"]


def container(job, role="Master"):
    return pod(job, role)["containers"][0]


def env(found):
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in found["env"]}


def of_kind(documents, kind, suffix=""):
    return [one for one in documents if one["kind"] == kind and one["metadata"]["name"].endswith(suffix)]


def test_one_node_is_a_master_alone(job):
    assert list(replicas(job())) == ["Master"]


def test_nodes_are_one_master_and_the_rest_workers_from_the_same_template(job):
    made = replicas(job(sets=["distributed.nodes=3", *SHARED]))
    assert (made["Master"]["replicas"], made["Worker"]["replicas"]) == (1, 2)
    assert made["Master"]["template"] == made["Worker"]["template"]


def test_elastic_jobs_have_workers_only_and_a_policy(job):
    made = job("elastic")
    assert list(replicas(made)) == ["Worker"]
    assert replicas(made)["Worker"]["replicas"] == 4
    policy = {"minReplicas": 2, "maxReplicas": 4, "maxRestarts": 10, "rdzvBackend": "c10d", "rdzvPort": 23456}
    assert made["spec"]["elasticPolicy"] == policy
    assert env(container(made, "Worker"))["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_the_count_of_processes_is_a_quoted_number(job):
    assert job(sets=["distributed.nprocPerNode=2"])["spec"]["nprocPerNode"] == "2"


@pytest.mark.parametrize("profile", ["two-node", "elastic", "h100-rdma", "benchmark"])
def test_nothing_that_the_operator_injects_is_set(job, profile):
    for replica in replicas(job(profile)).values():
        for each in [
            *replica["template"]["spec"].get("initContainers", []),
            *replica["template"]["spec"]["containers"],
        ]:
            assert not [
                name for name in env(each) if re.match(r"(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_|PET_)", name)
            ]


def test_the_training_yaml_arrives_byte_for_byte_and_its_hash_is_on_the_pod(manifests):
    import hashlib

    from podtune.cluster.chart.render import CHART

    text = yaml.safe_load((CHART / "values.yaml").read_text())["config"]
    documents = manifests()
    assert of_kind(documents, "ConfigMap")[0]["data"] == {"config.yaml": text}
    made = of_kind(documents, "PyTorchJob")[0]
    annotations = replicas(made)["Master"]["template"]["metadata"]["annotations"]
    assert annotations["podtune.io/config-sha256"] == hashlib.sha256(text.encode()).hexdigest()


def test_the_container_is_an_argv_of_the_launcher_and_no_shell(job):
    command = container(job("two-node"))["command"]
    assert command[:2] == ["podtune", "launch"]
    assert command[command.index("--") :] == [
        "--",
        "-m",
        "podtune.training",
        "--config",
        "/etc/podtune/config.yaml",
        "--strategy",
        "ddp",
    ]


def test_args_come_last_on_the_command_line(job):
    made = job(sets=["args={--max_length,1000000}"])
    assert container(made)["command"][-2:] == ["--max_length", "1000000"]
    assert pod(made)["initContainers"][0]["command"][-3:] == ["--", "--max_length", "1000000"], (
        "the prepare step sees them too"
    )


def test_run_policy_frees_gpus_and_ends(job):
    policy = job()["spec"]["runPolicy"]
    assert policy == {"cleanPodPolicy": "Running", "backoffLimit": 3, "ttlSecondsAfterFinished": 604800}
    assert {replica["restartPolicy"] for replica in replicas(job()).values()} == {"ExitCode"}


def test_pods_have_more_time_to_end_than_the_launcher_gives_the_processes(job):
    made = job()
    command = container(made)["command"]
    assert pod(made)["terminationGracePeriodSeconds"] > int(command[command.index("--shutdown-timeout") + 1])


def test_shared_memory_is_a_volume_in_memory(job):
    made = job(sets=["shm.sizeLimit=3Gi"])
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "3Gi"}} in pod(made)["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container(made)["volumeMounts"]


def test_gpu_requests_equal_their_limits(job):
    resources = container(job("a10-ethernet"))["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 4


@pytest.mark.parametrize(
    ("limit", "processes", "threads"), [("8", 1, "8"), ("7500m", 2, "3"), ("500m", 1, "1"), ("6", 4, "1")]
)
def test_threads_follow_the_cpu_limit_and_the_processes(job, limit, processes, threads):
    made = job(sets=[f"resources.limits.cpu={limit}", f"distributed.nprocPerNode={processes}"])
    assert env(container(made))["OMP_NUM_THREADS"] == threads


def test_one_init_container_prepares_with_the_network_and_training_runs_without(job):
    made = job("two-node")
    (prepare,) = pod(made)["initContainers"]
    assert prepare["command"][:2] == ["podtune", "prepare"]
    assert "nvidia.com/gpu" not in str(prepare["resources"])
    assert env(prepare)["HF_HUB_OFFLINE"] == "0"
    assert env(container(made))["HF_HUB_OFFLINE"] == "1"
    assert env(prepare)["HF_HOME"] == env(container(made))["HF_HOME"]


def test_the_token_is_a_reference_and_only_the_prepare_step_has_it(job):
    made = job(sets=["hfToken.existingSecret=hub"])
    assert env(pod(made)["initContainers"][0])["HF_TOKEN"] == {
        "secretKeyRef": {"name": "hub", "key": "token"}
    }
    assert "HF_TOKEN" not in env(container(made))


@pytest.mark.parametrize(("download", "offline"), [("true", "0"), ("false", "1")])
def test_a_job_that_streams_its_rows_reaches_the_hub_while_it_trains(job, download, offline):
    config = "model_name_or_path: a/model\ndataset_name: a/set\nmax_steps: 9\ndataset_streaming: true"
    sets = [f"config={config}", "hfToken.existingSecret=hub", f"prepare.download={download}"]
    streaming = env(container(job(sets=sets)))
    assert streaming["HF_HUB_OFFLINE"] == offline
    assert ("HF_TOKEN" in streaming) == (offline == "0")


def test_the_test_pod_never_has_the_token(manifests):
    """And no place in the job: it would wait for the pods of one."""
    for api in ("pytorchjob", "trainjob", "job"):
        (test,) = of_kind(manifests(sets=["hfToken.existingSecret=hub", f"api={api}"]), "Pod", "-test")
        assert not {"HF_TOKEN", "PET_NNODES"} & set(env(test["spec"]["containers"][0]))


def test_no_container_works_on_a_volume_or_imports_from_where_it_works(manifests):
    documents = manifests("two-node", sets=["aim.enabled=true"])
    pods = [
        *(replica["template"]["spec"] for replica in replicas(of_kind(documents, "PyTorchJob")[0]).values()),
        *(one["spec"]["template"]["spec"] for one in of_kind(documents, "Deployment")),
        *(one["spec"] for one in of_kind(documents, "Pod")),
    ]
    assert len(pods) == 4
    for each in [
        each for spec in pods for each in [*spec.get("initContainers", []), *spec.get("containers", [])]
    ]:
        assert each["workingDir"] == "/tmp", each["name"]
        assert env(each)["PYTHONSAFEPATH"] == "1", each["name"]


def test_a_python_file_on_the_output_volume_is_not_run(job, tmp_path):
    """Started as the pods start their processes, in a folder where somebody left a module's name."""
    (tmp_path / "typer.py").write_text("print('foreign')")
    words = [sys.executable, "-m", "podtune.cli", "lint", "--help"]
    safe = {name: value for name, value in env(container(job())).items() if name.startswith("PYTHON")}
    for more, foreign in (({}, True), (safe, False)):
        environment = {**os.environ, **more}
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ("foreign" in done.stdout) is foreign


def test_pods_know_who_they_are(job):
    found = env(container(job(name="my-run")))
    assert found["PODTUNE_JOB_NAME"] == found["RUN_NAME"] == "my-run"
    assert found["PODTUNE_POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert found["PODTUNE_IMAGE"] == "localhost/podtune:0.1.0"
    assert found["OUTPUT_DIR"] == "/outputs/my-run"


def test_claims_outlive_the_release(manifests):
    claims = of_kind(manifests(), "PersistentVolumeClaim")
    assert [claim["metadata"]["name"] for claim in claims] == ["run-data", "run-models", "run-output"]
    assert all(claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for claim in claims)


def test_an_existing_claim_is_mounted_and_none_is_made(manifests):
    documents = manifests(sets=["persistence.models.existingClaim=weights"])
    assert "run-models" not in [
        claim["metadata"]["name"] for claim in of_kind(documents, "PersistentVolumeClaim")
    ]
    volumes = pod(of_kind(documents, "PyTorchJob")[0])["volumes"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "weights"}} in volumes


def test_the_service_account_has_no_token_and_nothing_has_rights(manifests):
    documents = manifests()
    assert of_kind(documents, "ServiceAccount")[0]["automountServiceAccountToken"] is False
    assert pod(of_kind(documents, "PyTorchJob")[0])["automountServiceAccountToken"] is False
    assert not [one for one in documents if "Role" in one["kind"]]


def test_only_the_pods_of_the_job_reach_its_pods(manifests):
    (policy,) = of_kind(manifests(name="r1"), "NetworkPolicy", "r1")
    ours = {"podSelector": {"matchLabels": {"training.kubeflow.org/job-name": "r1"}}}
    assert policy["spec"]["podSelector"] == ours["podSelector"]
    assert policy["spec"]["ingress"] == [{"from": [ours]}]
    assert {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])} == {53, 5353}
    assert all(rule.get("to") for rule in policy["spec"]["egress"]), "no port is open to every address"


def test_dns_is_asked_where_the_values_say(manifests):
    elsewhere = "networkPolicy.dnsTo[0].namespaceSelector.matchLabels.name=dns"
    for sets, there in (([], "169.254.20.10/32"), ([elsewhere], "name")):
        (policy,) = of_kind(manifests(sets=sets, name="r1"), "NetworkPolicy", "r1")
        (rule,) = [rule for rule in policy["spec"]["egress"] if "ports" in rule]
        assert there in str(rule["to"])


def test_the_test_pod_has_a_policy_of_its_own(manifests):
    documents = manifests(name="r1")
    (policy,) = of_kind(documents, "NetworkPolicy", "-test")
    (test,) = of_kind(documents, "Pod", "-test")
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert wanted.items() <= test["metadata"]["labels"].items()
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": wanted}}]}]
    labels = replicas(of_kind(documents, "PyTorchJob")[0])["Master"]["template"]["metadata"]["labels"]
    assert not wanted.items() <= labels.items(), "it is not the one of the job's pods"


def test_https_is_open_only_where_something_is_downloaded(manifests):
    def ports(*profiles):
        (policy,) = of_kind(manifests(*profiles), "NetworkPolicy", "run")
        return {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}

    assert 443 in ports("single-gpu")
    assert 443 not in ports("single-gpu", "air-gapped")


def test_istio_stays_out(job):
    metadata = replicas(job())["Master"]["template"]["metadata"]
    assert (
        metadata["labels"]["sidecar.istio.io/inject"]
        == metadata["annotations"]["sidecar.istio.io/inject"]
        == "false"
    )


def test_the_port_is_a_value_for_jobs_on_the_nodes_network(job):
    made = job(sets=["hostNetwork=true", "port=24000"])
    assert pod(made)["hostNetwork"] is True
    assert container(made)["ports"] == [{"name": "pytorchjob-port", "containerPort": 24000}]


@pytest.mark.parametrize("api", ["pytorchjob", "trainjob", "job"])
def test_kueue_is_told_by_labels_on_the_job(job, api):
    found = job("two-node", "kueue", sets=["kueue.priorityClass=urgent", f"api={api}"])["metadata"]["labels"]
    assert found["kueue.x-k8s.io/queue-name"] == "user-queue"
    assert found["kueue.x-k8s.io/priority-class"] == "urgent"


def test_nccl_settings_are_the_same_on_every_pod_and_a_value_of_ones_own_wins(job):
    made = job("a10-ethernet", sets=["nccl.env.NCCL_SOCKET_IFNAME=net1"])
    assert (
        env(container(made))["NCCL_SOCKET_IFNAME"]
        == env(container(made, "Worker"))["NCCL_SOCKET_IFNAME"]
        == "net1"
    )
    assert env(container(made))["NCCL_IB_DISABLE"] == "1"


def test_openshift_chooses_the_user_itself(job):
    context = pod(job("single-gpu", "openshift"))["securityContext"]
    assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_a_benchmark_runs_the_sweep_in_every_pod_and_prepares_nothing(manifests):
    documents = manifests("benchmark")
    made = of_kind(documents, "PyTorchJob")[0]
    command = ["podtune", "bench", "run", "--in-job", "--preset", "node", "--output", "/outputs/run"]
    assert container(made)["command"] == [*command, "--preflight", "--wait", "900"]
    assert "initContainers" not in pod(made)
    assert not of_kind(documents, "ConfigMap")


def test_a_sweep_of_ones_own_comes_as_a_file(manifests):
    documents = manifests("benchmark", sets=["benchmark.sweep=models: [tinygpt-test]"])
    assert of_kind(documents, "ConfigMap")[0]["data"] == {"sweep.yaml": "models: [tinygpt-test]"}
    assert "/etc/podtune/sweep.yaml" in container(of_kind(documents, "PyTorchJob")[0])["command"]


def test_pods_look_at_what_they_got_before_they_train_unless_told_not_to(manifests):
    on, off = (
        container(of_kind(manifests("two-node", sets=more), "PyTorchJob")[0])
        for more in ([], ["preflight.enabled=false"])
    )
    words = ["--preflight", "/etc/podtune/config.yaml", "--wait", "900"]
    start = on["command"].index("--preflight")
    assert on["command"][start : start + 4] == words
    assert [word for word in on["command"] if word not in words] == [
        word for word in off["command"] if word not in words
    ]
    assert "--preflight" not in off["command"]


@pytest.mark.parametrize(("profile", "gpus"), [("cpu-smoke", None), ("two-node", "1"), ("h100-rdma", "8")])
def test_the_preflight_knows_how_many_gpus_the_pod_was_promised(manifests, profile, gpus):
    env = {
        each["name"]: each.get("value")
        for each in container(of_kind(manifests(profile), "PyTorchJob")[0])["env"]
    }
    assert env.get("PODTUNE_GPUS_PER_POD") == gpus


@pytest.mark.parametrize(
    ("profile", "more", "promised"),
    [
        ("cpu-smoke", [], None),
        ("two-node", [], "1.25"),
        ("h100-rdma", [], "12.5"),
        ("h100-rdma", ["nccl.env.PODTUNE_BUS_GB_PER_S=40"], "40"),
    ],
)
def test_the_preflight_knows_how_fast_the_network_was_promised(manifests, profile, more, promised):
    env = container(of_kind(manifests(profile, sets=more), "PyTorchJob")[0])["env"]
    named = [each.get("value") for each in env if each["name"] == "PODTUNE_BUS_GB_PER_S"]
    assert named == ([promised] if promised else [])


def test_a_label_that_a_profile_asks_of_nodes_can_be_taken_back(manifests):
    label = r"nodeSelector.nvidia\.com/gpu\.product"
    assert "nodeSelector" in pod(of_kind(manifests("two-node"), "PyTorchJob")[0])
    assert "nodeSelector" not in pod(of_kind(manifests("two-node", sets=[f"{label}=null"]), "PyTorchJob")[0])


def test_a_role_for_users_comes_when_asked_for_and_the_pods_get_none(manifests):
    who = {"kind": "User", "name": "ada", "apiGroup": "rbac.authorization.k8s.io"}
    subject = ",".join(f"rbac.subjects[0].{key}={value}" for key, value in who.items())
    documents = manifests(sets=["rbac.create=true", subject])
    (role,), (binding,) = of_kind(documents, "Role"), of_kind(documents, "RoleBinding")
    assert {
        "apiGroups": ["kubeflow.org"],
        "resources": ["pytorchjobs"],
        "verbs": ["get", "list", "create", "delete"],
    } in role["rules"]
    assert "secrets" not in str(role["rules"])
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [each["name"] for each in binding["subjects"]] == ["ada"]
    assert not of_kind(manifests(), "Role")


def test_the_role_reads_the_secrets_that_the_values_name_and_no_other(manifests):
    sets = ["rbac.create=true", "rbac.subjects[0].kind=User", "rbac.subjects[0].name=ada"]
    named = ["hfToken.existingSecret=hub", "image.pullSecrets={registry}"]
    (role,) = of_kind(manifests(sets=[*sets, *named]), "Role")
    (rule,) = [rule for rule in role["rules"] if "secrets" in rule["resources"]]
    assert (sorted(rule["resourceNames"]), rule["verbs"]) == (["hub", "registry"], ["get"])


def test_the_test_pod_runs_the_preflight_in_the_jobs_own_surroundings(manifests):
    documents = manifests("single-gpu")
    (test,) = of_kind(documents, "Pod", "-test")
    training = container(of_kind(documents, "PyTorchJob")[0])
    assert test["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert test["spec"]["containers"][0]["command"] == ["podtune", "preflight", "--json"]
    assert test["spec"]["containers"][0]["resources"] == training["resources"]
    assert test["spec"]["containers"][0]["volumeMounts"] == training["volumeMounts"]
    assert "training.kubeflow.org/job-name" not in test["metadata"]["labels"]


AIM = ["aim.enabled=true", "persistence.output.accessModes={ReadWriteMany}"]


def test_aims_page_has_one_writer_of_its_own_volume_and_reads_the_runs(manifests):
    documents = manifests(sets=AIM)
    (deployment,) = of_kind(documents, "Deployment")
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    spec = deployment["spec"]["template"]["spec"]
    commands = {each["name"]: each["command"] for each in spec["containers"]}
    assert commands["sync"] == ["podtune", "aim-sync", "/outputs", "--repo", "/aim", "--follow"]
    assert commands["ui"][:4] == ["podtune", "aim-ui", "--repo", "/aim"]
    for each in spec["containers"]:
        assert {"name": "output", "mountPath": "/outputs", "readOnly": True} in each["volumeMounts"]
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert env(each)["AIM_UI_TELEMETRY_ENABLED"] == "0"
    assert "run-aim" in [claim["metadata"]["name"] for claim in of_kind(documents, "PersistentVolumeClaim")]


def test_aims_page_is_closed_and_has_no_service_unless_asked(manifests):
    documents = manifests(sets=AIM)
    (policy,) = of_kind(documents, "NetworkPolicy", "-aim")
    assert policy["spec"]["ingress"] == []
    assert not of_kind(documents, "Service")
    (service,) = of_kind(manifests(sets=[*AIM, "aim.service.enabled=true"]), "Service")
    assert service["spec"]["type"] == "ClusterIP"


def test_aims_page_answers_to_the_names_by_which_it_can_be_opened(manifests):
    def names(*sets):
        (deployment,) = of_kind(manifests(sets=[*AIM, *sets]), "Deployment")
        ui = deployment["spec"]["template"]["spec"]["containers"][1]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert ui[probe]["httpGet"]["httpHeaders"] == [{"name": "Host", "value": "localhost"}]
        return [name for option, name in pairwise(ui["command"]) if option == "--name"]

    assert names() == []
    assert "run-aim.default.svc" in names("aim.service.enabled=true")
    assert names("aim.names={aim.example.org}") == ["aim.example.org"]


def test_aims_page_has_time_to_start(manifests):
    (deployment,) = of_kind(manifests(sets=AIM), "Deployment")
    probe = deployment["spec"]["template"]["spec"]["containers"][1]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 60


def test_a_trainjob_refers_to_the_installed_runtime_and_prepares_in_the_launcher(job):
    made = job("cpu-smoke", sets=["api=trainjob", *TWO])
    assert made["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": "torch-distributed",
    }
    trainer = made["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 1)
    assert trainer["command"][trainer["command"].index("--prepare") + 1] == "/etc/podtune/config.yaml"
    assert env(trainer)["PREPARE_OFFLINE"] == "0"
    spec = patched(made)["spec"]
    assert [mount["name"] for mount in spec["containers"][0]["volumeMounts"]] == [
        volume["name"] for volume in spec["volumes"]
    ]


def patched(trainjob):
    """The one pod template that a TrainJob's runtimePatches change."""
    (patch,) = trainjob["spec"]["runtimePatches"]
    (step,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert (patch["manager"], step["name"]) == ("podtune.io/chart", "node")
    return step["template"]["spec"]["template"]


def test_what_a_runtime_can_be_patched_with_is_that_of_the_other_kinds(manifests):
    placed = ["nodeSelector.zone=a", "affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution={}"]
    own = [
        "podLabels.team=a",
        "podAnnotations.note=b",
        "image.pullSecrets={r}",
        "serviceAccount.create=false",
    ]
    context = ["securityContext.runAsUser=7", "podSecurityContext.fsGroup=7"]
    sets = [*placed, *own, *context, "extraVolumes[0].name=x", "extraVolumeMounts[0].name=x"]
    plain = replicas(of_kind(manifests(sets=sets), "PyTorchJob")[0])["Master"]["template"]
    made = patched(of_kind(manifests(sets=[*sets, "api=trainjob"]), "TrainJob")[0])
    assert made["metadata"] == plain["metadata"]
    (node,) = made["spec"].pop("containers")
    assert made["spec"] == {key: plain["spec"][key] for key in made["spec"]}
    assert {"affinity", "imagePullSecrets", "nodeSelector", "securityContext"} <= set(made["spec"])
    for key in ("securityContext", "volumeMounts"):
        assert node[key] == plain["spec"]["containers"][0][key]


@pytest.mark.parametrize("target", ["2.2", "2.3", "2.4"])
@pytest.mark.parametrize("profile", ["cpu-smoke", "single-gpu", "two-node", "reference"])
def test_every_trainer_from_2_2_on_takes_the_trainjob(profile, target):
    from support.chart import render

    from podtune.cluster.chart.render import CHART
    from podtune.cluster.lint.check import lint
    from podtune.cluster.lint.targets import parse

    sets = ["api=trainjob", "runPolicy.activeDeadlineSeconds=600", "podLabels.team=a"]
    text = render([CHART.parents[1] / "deploy" / "values" / f"{profile}.yaml"], sets, "run", engine="python")
    found = lint([("rendered", text)], target=parse(f"trainer={target}"))
    assert (found.jobs, [str(each) for each in found.findings if each.severity != "note"]) == (
        ["TrainJob run"],
        [],
    )


def test_an_indexed_job_has_the_pods_of_the_others_a_service_and_the_variables_of_the_operator(manifests):
    documents = manifests("two-node", sets=["api=job"])
    (service,) = of_kind(documents, "Service")
    (made,) = of_kind(documents, "Job")
    spec, template = made["spec"], made["spec"]["template"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": "run"}
    plain = replicas(of_kind(manifests("two-node"), "PyTorchJob")[0])["Master"]["template"]
    assert template["metadata"] == plain["metadata"]
    pod_spec = template["spec"]
    assert (pod_spec.pop("subdomain"), pod_spec.pop("restartPolicy")) == ("run", "Never")
    added = pod_spec["containers"][0]["env"][len(plain["spec"]["containers"][0]["env"]) :]
    del pod_spec["containers"][0]["env"][-len(added) :]
    assert pod_spec == plain["spec"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert env({"env": added}) == {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": {"fieldRef": {"fieldPath": index}},
        "PET_MASTER_ADDR": "run-0.run",
        "PET_MASTER_PORT": "23456",
    }


@pytest.mark.parametrize(
    ("policy", "final", "again"),
    [
        ("ExitCode", {1, 64, 75, 78, 127}, {129, 137, 143, 170}),
        ("Never", {1, 143}, set()),
        ("OnFailure", set(), {1}),
    ],
)
def test_a_job_ends_by_the_codes_that_end_a_pytorchjob(job, policy, final, again):
    from podtune.cluster.job import indexed_job, pytorchjob

    for api, contract in (("job", indexed_job), ("pytorchjob", pytorchjob)):
        made = job(sets=[f"api={api}", f"restartPolicy={policy}"])
        (found,) = contract.pods(made)
        assert final <= found.final
        assert not again & found.final, api


def test_the_runtime_for_administrators_ends_a_job_by_the_same_codes(job):
    from podtune.cluster.chart.render import CHART
    from podtune.cluster.lint.check import lint

    text = (CHART.parents[1] / "deploy" / "training-runtime.yaml").read_text()
    (step,) = yaml.safe_load(text)["spec"]["template"]["spec"]["replicatedJobs"]
    assert step["template"]["spec"]["podFailurePolicy"] == job(sets=["api=job"])["spec"]["podFailurePolicy"]
    assert lint([("runtime", text)]).findings == []


def test_a_label_can_be_taken_back_from_a_trainjob_too(job):
    made = job("two-node", sets=["api=trainjob", r"nodeSelector.nvidia\.com/gpu\.product=null"])
    assert "nodeSelector" not in patched(made)["spec"]


def test_a_trainjobs_gpu_limits_are_requested_too(job):
    resources = job("two-node", sets=["api=trainjob"])["spec"]["trainer"]["resourcesPerNode"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize(
    ("api", "label"),
    [("trainjob", "jobset.sigs.k8s.io/jobset-name"), ("job", "batch.kubernetes.io/job-name")],
)
def test_the_pods_of_each_kind_are_found_by_their_own_label(manifests, api, label):
    (policy,) = of_kind(manifests("cpu-smoke", sets=[f"api={api}"], name="t1"), "NetworkPolicy", "t1")
    assert policy["spec"]["podSelector"] == {"matchLabels": {label: "t1"}}


@pytest.mark.parametrize("name", ["true", "null", "on", "e5"])
def test_a_name_is_a_string_whatever_yaml_would_take_it_for(manifests, name):
    documents = manifests(sets=["aim.enabled=true", AIM[1], "kueue.queueName=no"], name=name)
    assert [one["metadata"]["name"] for one in documents if one["kind"] == "PyTorchJob"] == [name]
    strings = [one["metadata"]["name"] for one in documents]
    strings += [value for one in documents for value in one["metadata"]["labels"].values()]
    assert all(isinstance(each, str) for each in strings)


PER_POD = [
    "distributed.nodes=2",
    *(f"persistence.{name}.perPod=true" for name in ("models", "data", "output")),
]


def test_a_volume_for_each_pod_is_made_and_gone_with_it(manifests, job):
    sets = [*PER_POD, "config=publish: s3://bucket/runs"]
    pod = job(sets=sets)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert all("ephemeral" in volumes[name] for name in ("models", "data", "output"))
    template = volumes["output"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert template["resources"] == {"requests": {"storage": "20Gi"}}
    documents = manifests(sets=sets)
    assert not [each for each in documents if each["kind"] == "PersistentVolumeClaim"]
    policy = next(each for each in documents if each["kind"] == "NetworkPolicy")
    assert {"ports": [{"port": 443, "protocol": "TCP"}]} in policy["spec"]["egress"]


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (PER_POD, "nothing says where to publish it"),
        (["persistence.models.perPod=true", "persistence.models.existingClaim=c"], "existingClaim names c"),
        ([*PER_POD, "config=publish: s3://b/r", "aim.enabled=true"], "the Aim pod reads"),
    ],
)
def test_a_volume_for_each_pod_that_would_lose_something_is_refused(manifests, sets, says):
    with pytest.raises(UserError, match=says):
        manifests(sets=sets)


ESCAPES = """
runtimeClassName: nvidia
schedulerName: volcano
topologySpreadConstraints:
  - {maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: ScheduleAnyway}
resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
extraVolumes: [{name: scratch, emptyDir: {}}]
extraVolumeMounts: [{name: scratch, mountPath: /scratch}]
extraInitContainers: [{name: tune, image: "tools.example/tune:1"}]
sidecars: [{name: agent, image: "tools.example/agent:1"}]
"""


@pytest.fixture
def escapes(tmp_path):
    (tmp_path / "escapes.yaml").write_text(ESCAPES)
    return tmp_path / "escapes.yaml"


def test_what_the_chart_has_no_word_for_goes_into_the_pod_as_it_is(escapes):
    from support.chart import render

    from podtune.cluster.lint.check import lint

    text = render([escapes], TWO, "run", engine="python")
    made = next(one for one in yaml.safe_load_all(text) if one["kind"] == "PyTorchJob")
    asked = yaml.safe_load(ESCAPES)
    for role in ("Master", "Worker"):
        spec = pod(made, role)
        for key in ("runtimeClassName", "schedulerName", "topologySpreadConstraints", "resourceClaims"):
            assert spec[key] == asked[key]
        agent, tune, prepare = spec["initContainers"]
        assert (agent["restartPolicy"], tune["name"], prepare["name"]) == ("Always", "tune", "prepare")
        assert container(made, role)["resources"]["claims"] == [{"name": "gpu"}]
        assert {"name": "scratch", "emptyDir": {}} in spec["volumes"]
        for each in (prepare, container(made, role)):
            assert {"name": "scratch", "mountPath": "/scratch"} in each["volumeMounts"]
    assert lint([("rendered", text)]).count("error") == 0


def test_a_sidecar_needs_no_prepare(escapes):
    from support.chart import render

    text = render([escapes], ["mode=benchmark"], "run", engine="python")
    made = next(one for one in yaml.safe_load_all(text) if one["kind"] == "PyTorchJob")
    assert [each["name"] for each in pod(made)["initContainers"]] == ["agent", "tune"]


@pytest.mark.parametrize("place", ["podLabels", "commonLabels"])
@pytest.mark.parametrize(
    "label", ["training.kubeflow.org/job-name", "app.kubernetes.io/instance", "jobset.sigs.k8s.io/x"]
)
def test_labels_by_which_a_pod_is_found_are_not_the_users(job, place, label):
    with pytest.raises(UserError, match="know whose a pod is"):
        job(sets=[f"{place}.{label.replace('.', chr(92) + '.')}=other"])


def test_what_a_trainjob_cannot_say_is_refused(escapes):
    from support.chart import render

    with pytest.raises(UserError, match="with api trainjob"):
        render([escapes], ["api=trainjob"], "run", engine="python")
