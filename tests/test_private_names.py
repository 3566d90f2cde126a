"""What podtune uses of libraries without their promise: each such name is still there.

Checked against torch 2.13, transformers 5.23, trl 1.16, accelerate 1.15, datasets 5.2, fsspec 2026.9,
deepspeed 0.19 and aim 3.29. After raising one of them: a name that is gone is said here, with the file that
uses it, and not by a pod.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "training" / "podtune"

#: name: where it is found, and what uses it
NAMES = {
    "_apply_liger_kernel_to_instance": ("liger_kernel.transformers", "sft/train/liger.py"),
    "_cdata": ("torch.UntypedStorage", "bench/case/counted_memory.py"),
    "_compile_jinja_template": ("transformers.utils.chat_template_utils", "sft/data/chat.py"),
    "_dump_snapshot": ("torch.cuda.memory", "bench/case/profiling.py"),
    "_encode_plus": ("transformers.PreTrainedTokenizerFast", "sft/data/tokenizer.py"),
    "_get_grad_norm": ("transformers.Trainer", "sft/train/trainer.py"),
    "_get_num_items_in_batch": ("transformers.Trainer", "sft/train/trial.py"),
    "_get_output_dir": ("transformers.Trainer", "sft/train/trainer.py"),
    "_get_train_sampler": ("transformers.Trainer", "sft/train/trainer.py"),
    "_fingerprint": ("datasets.Dataset.from_dict({})", "sft/data/tokenise.py"),
    "_is_amx_tile_supported": ("torch.cpu", "sft/cpu/attention.py"),
    "_is_avx512_bf16_supported": ("torch.cpu", "sft/config/hardware.py"),
    "_issue_warnings_after_load": ("transformers.Trainer", "sft/train/trainer.py"),
    "_ops": ("torch", "bench/models/stack.py"),
    "_remove_unused_columns": ("transformers.Trainer", "sft/train/fullest_batch.py"),
    "_record_memory_history": ("torch.cuda.memory", "bench/case/profiling.py"),
    "_resolve_process_group": ("torch.distributed.distributed_c10d", "bench/case/communication.py"),
    "_load_from_checkpoint": ("transformers.Trainer", "sft/train/sharded_state.py"),
    "_load_optimizer_and_scheduler": ("transformers.Trainer", "sft/train/sharded_state.py"),
    "_save_optimizer_and_scheduler": ("transformers.Trainer", "sft/train/sharded_state.py"),
    "_load_best_model": ("transformers.Trainer", "sft/train/trainer.py"),
    "_run_epoch": ("transformers.Trainer", "sft/train/trainer.py"),
    "_save_checkpoint": ("transformers.Trainer", "sft/train/trainer.py"),
    "_scaled_dot_product_cudnn_attention": ("torch.ops.aten", "bench/models/stack.py"),
    "_scaled_dot_product_efficient_attention": ("torch.ops.aten", "bench/models/stack.py"),
    "_scaled_dot_product_flash_attention": ("torch.ops.aten", "bench/models/stack.py"),
    "_scaled_dot_product_flash_attention_for_cpu": ("torch.ops.aten", "bench/models/stack.py"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": ("torch.ops.aten", "sft/cpu/attention.py"),
    "_softmax_backward_data": ("torch.ops.aten", "sft/cpu/attention.py"),
    "_scaled_mm": ("torch", "bench/strategies/float8.py"),
    "_set_allocator_settings": ("torch.cuda.memory", "run/distributed.py"),
    "_shared_state": ("accelerate.PartialState", "sft/train/trainer.py"),
    "_schema": ("torch.ops.aten.mm.default", "bench/case/communication.py"),
    "_tokenize": ("trl.data_utils", "sft/data/encode.py"),
    "_type": ("torch.ScriptObject", "bench/case/communication.py"),
    "_strip_protocol": ("fsspec.AbstractFileSystem", "sft/source/object_store.py"),
    "build_shm_op": ("deepspeed.comm.torch", "machine/building.py"),
    # aim; the ones of its objects are made with a run
    "_track": ("aim.sdk.tracker.RunTracker", "run/aim/repository.py"),
}
#: made when their object is: the tests of what uses them hold these
MADE = {
    "_metrics",
    "_total_train_tokens",
    "_resources",
    "_tracker",
    "_exit",
    "_c10d_functional",
    "_last_update_time",
}


def found(path: str) -> object:
    """The object at a dotted path, called where the path ends with parentheses."""
    dotted, _, call = path.partition("(")
    words = dotted.split(".")
    for length in range(len(words), 0, -1):
        try:
            each: object = importlib.import_module(".".join(words[:length]))
        except ModuleNotFoundError:
            continue
        for word in words[length:]:
            each = getattr(each, word)
        return each({}) if call.startswith("{") else each() if call else each  # type: ignore[operator]
    raise AssertionError(f"no module for {path}")


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_of_a_library_is_still_there(name: str) -> None:
    path, user = NAMES[name]
    if not importlib.util.find_spec(path.split(".")[0].split("(")[0]):
        pytest.skip(f"{path} is not installed")
    assert hasattr(found(path), name), f"{path} has no {name} any more: {user} needs another way"
    assert name in (PACKAGE / user).read_text(encoding="utf-8"), f"{user} does not use {name} any more"


def test_no_other_private_names_of_libraries_are_used() -> None:
    """But those that podtune's own classes and functions bear."""
    own, used = set(), set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                own.add(node.target.id)
            elif isinstance(node, ast.Attribute):
                (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("podtune"):
                used |= {alias.name for alias in node.names}
    private = {name for name in used - own if name.startswith("_") and not name.startswith("__")}
    assert private <= {*NAMES, *MADE}
