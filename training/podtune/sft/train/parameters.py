"""The trained parameters of a model: how many, in which layers, in how large a checkpoint."""

from __future__ import annotations

from typing import Any

from podtune.run.output_volume import checkpoint_bytes


def trained_parameters(model: Any) -> int:
    """Count the parameters that the optimizer changes, those of all ranks where they are sharded."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad)


def freeze_unreached(model: Any) -> int:
    """Freeze a multimodal model's towers, which rows of text never reach; return how many parameters."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not type(base).__name__.endswith("ForConditionalGeneration"):
        return 0
    reached = [base.get_decoder(), base.get_output_embeddings()]
    text = {id(each) for part in reached if part is not None for each in part.parameters()}
    unreached = [each for each in model.parameters() if each.requires_grad and id(each) not in text]
    for parameter in unreached:  # DDP would end the run at step 2, waiting for their gradients
        parameter.requires_grad_(False)
    return sum(each.numel() for each in unreached)


def adapter_layers(model: Any) -> list[str]:
    """Name the layers that have adapters, a text for each adapter: PEFT's own choice is not all layers."""
    configs = getattr(model, "peft_config", {}).values()
    names = [getattr(each, "target_modules", None) for each in configs]  # prompt tuning has none
    return [" ".join(sorted(layers)) for layers in names if isinstance(layers, set | list) and layers]


def estimated_checkpoint_bytes(trainer: Any) -> int:
    """Estimate the size of one checkpoint of ``trainer``."""
    parameters, model_only = trainer.model.parameters(), trainer.args.save_only_model
    size = max((each.element_size() for each in parameters if each.requires_grad), default=0)
    weights = trained_parameters(trainer.model) * size
    # shards hold the weights, too, by the names that the model has for them
    own_copy = weights if trainer.is_fsdp_enabled and not model_only else 0
    return checkpoint_bytes(weights, trainer.args.optim, model_only=model_only) + own_copy


def leave_casts_to_autocast(model: Any) -> None:
    """Leave out LoRA's cast of each layer's input to fp32, which autocast undoes at once."""
    # the same bits for half of an adapter's memory traffic
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
