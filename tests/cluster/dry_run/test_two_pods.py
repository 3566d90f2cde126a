"""Two pods of a dry run find each other through torchrun, by nothing but what the operator would inject."""

from __future__ import annotations

from pathlib import Path

from podtune.cluster.dry_run import dry_run

PROGRAM = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_two_pods_all_reduce_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    container = {
        "name": "pytorch",
        "image": "i:1",
        "command": ["torchrun", str(script)],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    replica = {"replicas": 1, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
    spec = {
        "nprocPerNode": "1",
        "runPolicy": {"cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {"Master": replica, "Worker": replica},
    }
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "run"}, "spec": spec}
    lines: list[str] = []
    result = dry_run.run(
        [job], folder=tmp_path / "run", emit=lambda pod, line: lines.append(f"{pod}: {line}"), timeout_s=120
    )
    assert result.condition == "Succeeded", "\n".join(lines)
    assert {"run-master-0: rank 0 of 2: 3", "run-worker-0: rank 1 of 2: 3"} <= set(lines)
