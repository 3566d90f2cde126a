"""From the command, or a job's submission, to the end of the first step: podtune beside plain TRL.

    python benchmarks/first_step.py                # podtune train and trl sft, here, on the same YAML
    IMAGE=localhost/podtune:1 python benchmarks/first_step.py --cluster --pods 1 2 --json first_step.json

On the cluster of KUBECONFIG the profile cpu-smoke trains one step, in a namespace that is made and deleted,
with IMAGE on the nodes. "cold" is on new volumes, so model and data are made; TRL's then has them, and no
cache. Warm starts follow on the same volumes. TRL is torchrun with its own script as the command of the same
pods. The profile as it is, on new volumes and to its end ("whole"), comes last: it evaluates first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from podtune.cluster.chart.render import merged_values, rendered
from podtune.cluster.job.manifest import Json, name_of
from podtune.cluster.live.client import Cluster
from podtune.cluster.live.submit import create, installable
from podtune.cluster.why.state import ENDS, phase, start_of, state
from podtune.run.record import timestamp

FIRST_STEP = {"podtune": re.compile(r"^first step done|^step +1/"), "trl": re.compile(r"['\"]loss['\"]: ")}
PHASE = re.compile(r"([a-z]+) ([\d.]+)(?:,|$)")
LIMIT_S = 900.0
ROOT = {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False}  # classes without fsGroup give it volumes
VOLUMES, FIRST = ("models", "data", "output"), "podtune-0"
ONE_STEP: Json = {"max_steps": 1, "logging_steps": 1, "save_strategy": "no", "eval_strategy": "no"}
#: settings of what comes before or after the first step
LATER = {"answer_rows", "answer_max_new_tokens", "max_eval_rows", "eval_on_start", "eval_steps", "save_steps"}
TRL = ["torchrun", "-m", "trl.scripts.sft", "--config", "/etc/podtune/config.yaml"]
AS_PROMPTS = """
import json, pathlib, sys
from podtune.sft.data.readers import rows_at
rows, folder = map(pathlib.Path, sys.argv[1:])
folder.mkdir()
with (folder / "train.jsonl").open("w") as file:
    for row in rows_at(rows):
        file.write(json.dumps({"prompt": row["question"], "completion": row["answer"]}) + "\\n")
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="pairs that count")
    parser.add_argument("--cluster", action="store_true", help="as jobs on the cluster of KUBECONFIG")
    parser.add_argument("--pods", type=int, nargs="+", default=[1, 2], help="of a job, on the cluster")
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    rows = on_cluster(args.pods, args.repeats) if args.cluster else here(args.repeats)
    (args.json or Path(os.devnull)).write_text(json.dumps(rows, indent=2))
    return 0


# ---- processes here ----
def here(repeats: int) -> list[Json]:
    """The two take turns; the first pair is not counted."""
    seconds: dict[str, list[float]] = {"podtune": [], "trl": []}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        for pair in range(repeats + 1):
            for side in seconds if pair % 2 else reversed(seconds):
                took = first_step(side, Path(scratch), f"{side}-{pair}")
                seconds[side] += [took] if pair else []
    ratios = [ours / theirs for ours, theirs in zip(*seconds.values(), strict=True)]
    for side, times in (*seconds.items(), ("ratio", ratios)):
        print(f"{side:8} {statistics.median(times):6.2f} s ({min(times):.2f} - {max(times):.2f})")
    return [{"side": side, "first_step_s": times} for side, times in seconds.items()]


def prepare(folder: Path) -> None:
    """The model, train.jsonl and the YAML that both read."""
    from podtune.demo_data.build import build
    from podtune.sft.model.build import build_model

    build(folder / "qa", rows=1_000)
    build_model("micro", folder / "qa", folder / "model")
    subprocess.run([sys.executable, "-c", AS_PROMPTS, f"{folder}/qa", f"{folder}/data"], check=True)
    settings: Json = {"model_name_or_path": f"{folder}/model", "dataset_name": f"{folder}/data"}
    settings |= ONE_STEP | {"report_to": "none", "use_cpu": True, "bf16": False}
    (folder / "sft.yaml").write_text(yaml.safe_dump(settings))


def first_step(side: str, folder: Path, name: str) -> float:
    """Seconds until ``side`` says that its first step is done."""
    command = [f"{Path(sys.executable).parent}/{side}", "train" if side == "podtune" else "sft"]
    words = [*command, "--config", f"{folder}/sft.yaml", "--output_dir", f"{folder}/{name}"]
    environment = {"HF_HOME": f"{folder}/{name}-home", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    began, said = time.perf_counter(), list[str]()
    with subprocess.Popen(words, **pipes, env=os.environ | environment) as process:
        for line in process.stdout or ():
            said.append(line)
            if FIRST_STEP[side].search(line):
                took = time.perf_counter() - began
                process.wait(LIMIT_S)
                return took
    sys.exit(f"{side} ended with {process.returncode} before its first step:\n{''.join(said[-30:])}")


# ---- jobs on a cluster ----
def on_cluster(counts: list[int], repeats: int) -> list[Json]:
    """A namespace for each number of pods, so that its volumes are new."""
    rows: list[Json] = []
    print("side     pods files  first step s    job s   load  seconds of each phase of the first pod")
    for pods in counts:
        cluster = Cluster(f"first-step-{secrets.token_hex(3)}")
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": cluster.namespace}}
        cluster.request("POST", "/api/v1/namespaces", body=namespace)
        try:
            for run in range(repeats + 1):
                files = "warm" if run else "cold"
                rows.append(measured(cluster, "podtune", pods, files, f"podtune-{run}"))
                if not run:
                    make_prompts(cluster)
                rows.append(measured(cluster, "trl", pods, files, f"trl-{run}"))
            rows.append(measured(cluster, "podtune", pods, "whole", "whole"))
        finally:
            cluster.request("DELETE", f"/api/v1/namespaces/{cluster.namespace}")
    return rows


def measured(cluster: Cluster, side: str, pods: int, files: str, name: str) -> Json:
    """Submit a job, wait for its end, and print seconds and phases of its first pod's start."""
    row: Json = {"side": side, "pods": pods, "files": files, "load": round(os.getloadavg()[0], 1)}
    documents = manifests(side, pods, name, whole=files == "whole")
    began = time.time()
    create(cluster, documents)
    while state(job := cluster.job(name))[0] not in ENDS and time.time() - began < LIMIT_S:
        time.sleep(0.5)
    ended, pod = time.time(), cluster.pods(job)[0]
    lines = [line.partition(" ")[::2] for line in cluster.log_lines(name_of(pod), container="pytorch")]
    at = next((at for at, text in lines if FIRST_STEP[side].search(text)), "")
    if state(job)[0] != "Succeeded" or not at:
        sys.exit("\n".join([f"{name} is {state(job)}:", *(text for _, text in lines[-30:])]))
    said = next((text for _, text in lines if text.startswith("first step done after")), "")
    phases = {phase: float(seconds) for phase, seconds in PHASE.findall(said.partition(": ")[2])}
    row |= {"first_step_s": round(timestamp(at) - began, 1), "job_s": round(ended - began, 1)}
    row["phases"] = start_of(pod) | phases
    told = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in row["phases"].items())
    print(f"{side:8} {pods:4} {files:6}", end="")
    print(f"{row['first_step_s']:12.1f} {row['job_s']:8.1f} {row['load']:6.1f}  {told}", flush=True)
    return row


def manifests(side: str, pods: int, name: str, *, whole: bool) -> list[Json]:
    """The profile for IMAGE as a job; TRL's is the same but for command, settings, cache and preparation."""
    repository, _, tag = os.environ["IMAGE"].rpartition(":")
    values = merged_values([Path("cpu-smoke")], []) | {"image": {"repository": repository, "tag": tag}}
    values["distributed"]["nodes"] = pods
    values["podSecurityContext"] = ROOT
    own = {volume: {"accessModes": ["ReadWriteMany"]} for volume in VOLUMES}
    shared = {volume: {"existingClaim": f"{FIRST}-{volume}"} for volume in VOLUMES}
    values["persistence"] = own if whole or name == FIRST else shared
    settings = yaml.safe_load(values["config"])
    if not whole:
        settings = {key: settings[key] for key in settings.keys() - LATER} | ONE_STEP
    if side == "trl":
        values["prepare"]["enabled"] = False
        accumulated = settings.pop("global_batch_size") // settings["per_device_train_batch_size"] // pods
        settings |= {"gradient_accumulation_steps": accumulated, "dataset_name": "/data/trl"}
        settings |= {"use_cpu": True, "report_to": "none", "output_dir": f"/outputs/{name}"}
    text = rendered(values | {"config": yaml.safe_dump(settings)}, name)
    documents = installable(list(yaml.safe_load_all(text)))
    for replica in documents[-1]["spec"]["pytorchReplicaSpecs"].values() if side == "trl" else ():
        (container,) = replica["template"]["spec"]["containers"]
        container["command"] = TRL
        container["env"] = [entry for entry in container["env"] if entry["name"] != "HF_HOME"]
        container["env"].append({"name": "HF_HOME", "value": "/models/trl"})
    return documents


def make_prompts(cluster: Cluster) -> None:
    """The rows in the form that TRL knows, by a pod."""
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": f"{FIRST}-data"}}
    command = ["python", "-c", AS_PROMPTS, "/data/qa/train.parquet", "/data/trl"]
    container: Json = {"name": "c", "image": os.environ["IMAGE"], "command": command}
    container |= {"volumeMounts": [{"name": "data", "mountPath": "/data"}], "securityContext": ROOT}
    pod: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "prompts"}}
    pod["spec"] = {"restartPolicy": "Never", "containers": [container], "volumes": [claim]}
    cluster.put(pod)
    while phase(cluster.get(cluster.path_of(pod)) or {}) not in ENDS:
        time.sleep(0.5)


if __name__ == "__main__":
    raise SystemExit(main())
