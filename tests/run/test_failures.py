"""Full memory and full disks are final; a broken GPU and a lost peer are worth a restart."""

import pytest
import torch
import torch.distributed as dist

from podtune.run.errors import exit_code, report
from podtune.run.exit import peer_failure

FINAL_MEMORY, FINAL_SPACE, RESTART, FAULT = 71, 74, 170, 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), FINAL_MEMORY),
        (
            dist.DistBackendError("NCCL error: ncclUnhandledCudaError: Cuda failure 2 'out of memory'"),
            FINAL_MEMORY,
        ),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
            FINAL_MEMORY,
        ),
        (RuntimeError("Triton Error [CUDA]: out of memory"), FINAL_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory"), FINAL_MEMORY),
        (
            dist.DistBackendError("NCCL error: write to /dev/shm/nccl-8zKL failed: No space left on device"),
            FINAL_SPACE,
        ),
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), RESTART),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), RESTART),
        (RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), RESTART),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), RESTART),
        (RuntimeError("[gloo] Connection closed by peer [10.0.0.2]"), RESTART),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), FAULT),
        (RuntimeError("shapes (2, 3) and (4, 5) cannot be multiplied"), FAULT),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_restart_is_asked_for_only_where_it_can_help(error: Exception, code: int) -> None:
    assert exit_code(peer_failure(error) or error) == code


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "smaller per_device_train_batch_size"),
        ("No space left on device: /dev/shm/nccl-1", "shm.sizeLimit"),
    ],
)
def test_full_memory_and_full_shared_memory_come_with_advice(
    text: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    report(RuntimeError(text))
    assert advice in capsys.readouterr().err
