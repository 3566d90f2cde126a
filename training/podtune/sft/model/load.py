"""Load a causal language model; refuse unsafe or broken ones."""

from __future__ import annotations

import json
import re
import sys
import warnings
from typing import TYPE_CHECKING, Any, cast

from podtune.run.errors import DataError
from podtune.sft.model.end_to_end import architecture
from podtune.sft.source.model import Origin, base_of, explained, load_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_model(
    origin: Origin,
    *,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    model_init_kwargs: dict[str, Any] | None = None,
    is_trainable: bool = False,
) -> PreTrainedModel:
    """Load the causal language model at ``origin``; an adapter on its base, frozen but for ``is_trainable``.

    ``model_init_kwargs`` are further arguments of ``from_pretrained`` and win over the others.

    Raises:
        UserError: weights in pickle files (loading one can run code), weights that lack tensors of the
            architecture, a broken folder, remote code that was not allowed.
    """
    _refuse_pickle(origin)
    if attn_implementation is None:
        _refuse_kernel(origin)
    import transformers
    from transformers.utils import logging

    # a bar of each rank for weights read and written, across podtune's own; the hub's, of downloads, stay
    logging.set_tqdm_hook(lambda _factory, given, named: logging.EmptyTqdm(*given, **named))
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # a bar in a log is a hundred lines
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation}
    options["trust_remote_code"] = trust_remote_code
    # a None would hide the quantization that the model's own config.json names
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if origin.is_adapter:
        return _adapted(origin, is_trainable, **options, model_init_kwargs=model_init_kwargs)
    with explained(origin.name, "model"):
        whole = architecture(load_config(origin, trust_remote_code), trust_remote_code).name
        multimodal = whole.endswith("ForConditionalGeneration")
        kind = getattr(transformers, whole) if multimodal else transformers.AutoModelForCausalLM
        model, report = kind.from_pretrained(
            origin.name,
            **(options | origin.arguments | (model_init_kwargs or {})),
            # also where pickled weights lie beside them
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise DataError(
            f"the weights lack {len(missing)} tensors of the architecture, such as {missing[0]}",
            where=origin.name,
            fix="give the complete folder, or correct config.json",
        )
    if getattr(model, "generation_config", None) is None:  # of a class that cannot generate; TRL writes to it
        model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    if origin.url:  # an adapter names its base by what the user wrote, not by this machine's copy
        model.name_or_path = origin.url
        # PEFT cannot look there for a smaller vocabulary; none is resized here
        warnings.filterwarnings("ignore", message=f"Could not find a config file in {re.escape(origin.url)}")
    return cast("PreTrainedModel", model)


def _adapted(adapter: Origin, is_trainable: bool, **options: Any) -> PreTrainedModel:
    """Put ``adapter`` on its base model, which is loaded with the ``options`` of :func:`load_model`."""
    base = load_model(base_of(adapter), **options)
    with explained(adapter.name, "adapter"), warnings.catch_warnings():
        # peft asks transformers for names of its last version
        warnings.simplefilter("ignore", FutureWarning)
        from peft import PeftModel

        adapted: PreTrainedModel = PeftModel.from_pretrained(
            base, adapter.name, is_trainable=is_trainable, **adapter.arguments
        )
    return adapted


def _refuse_pickle(origin: Origin) -> None:
    if any(name.endswith(".safetensors") for name in origin.files):
        return
    pickled = [name for name in origin.files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    if pickled:
        raise DataError(
            f"the weights are in {pickled[0]}, a pickle file, and loading one can run any code",
            where=origin.name,
            fix="convert it to safetensors where that code may run: model.save_pretrained(folder)",
        )
    raise DataError("holds no weights (*.safetensors)", where=origin.name, fix="give a complete model folder")


def _refuse_kernel(origin: Origin) -> None:
    """Refuse a config.json that names an attention from the hub, which is code."""
    if "config.json" not in origin.files:
        return
    asked: list[object] = []

    def look(pairs: list[tuple[str, Any]]) -> dict[str, object]:
        for key, value in pairs:
            if key.lstrip("_") == "attn_implementation":  # of a multimodal model a mapping of its parts
                asked.extend(value.values() if isinstance(value, dict) else [value])
        return dict(pairs)

    with explained(origin.name, "config.json"):
        json.loads(origin.file("config.json").read_text(encoding="utf-8"), object_pairs_hook=look)
    if named := next((name for name in asked if "/" in str(name)), None):
        raise DataError(
            f"its config.json asks for the attention {named}, which is code from the hub",
            where=origin.name,
            fix=f"set attn_implementation: sdpa, or {named} if you trust it",
        )
