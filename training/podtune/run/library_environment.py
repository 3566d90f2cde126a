"""How libraries are imported: the environment variables that they read then, and what they leave out."""

from __future__ import annotations

import os
import sys
import warnings

ALLOCATOR = "PYTORCH_ALLOC_CONF"


def set_library_environment(threads: int, traces: str = "") -> None:
    """Set threads, memory allocation and quiet; what the user has set stays, but for the ``threads``.

    ``traces`` is where torch's Flight Recorder writes a rank's collectives when one times out, less the rank:
    on the run's volume, as the pod's own disk goes with the pod.
    """
    if traces and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:  # the older name
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", traces)
    os.environ.setdefault("PYTHONSAFEPATH", "1")  # as podtune.cli does, where torchrun started this program
    # torch refuses pickles of anything but tensors, whatever a library's call says: a checkpoint is a file
    # that somebody else may have written
    os.environ.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    spin_briefly()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not {ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        # each batch has another length, which leaves gaps in memory that comes in blocks of fixed size
        os.environ[ALLOCATOR] = "expandable_segments:True"
    # oneDNN and torch's layer over it keep the kernels, with the memory that they work in, of the last 1,024
    # shapes each: more than a gigabyte where each batch has another length. Those of a small model, whose
    # lengths are rounded up (podtune.sft.train.trainer), fit in this.
    for capacity in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(capacity, "256")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # a bar in a log is a hundred lines
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"accelerate|transformers|trl|torch\.distributed"
    )


def spin_briefly() -> None:
    """Let OpenMP's threads spin for one another only briefly, unless the user chose otherwise.

    Where something else runs, too, spinning takes the cores from the threads that are waited for;
    docs/cluster.md has the figures.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def import_peft(*, quantized: bool) -> None:
    """Import PEFT without what it and accelerate import wherever it is installed and this run does not use.

    bitsandbytes, for ``quantized`` weights, brings torch's compiler: a sixth of what a start imports.
    DeepSpeed is the benchmark's.
    """
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]
    if "bitsandbytes" in sys.modules or quantized:
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    from peft.import_utils import is_bnb_available

    is_bnb_available()  # the answer is kept, and LoRA's layers go by it
    del sys.modules["bitsandbytes"]  # an optimizer may ask for it
