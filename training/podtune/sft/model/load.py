"""Loading a causal language model and its tokenizer, refusing what is unsafe or broken, and counting what it
computes.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podtune.run.errors import DATA, UNAVAILABLE, UserError
from podtune.sft.model.origin import Origin, explained, locate_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Name = str | os.PathLike[str]


def load_tokenizer(
    name_or_path: Name, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, adapter folder or hub id.

    Raises:
        UserError: not found, unreachable, gated, broken, or remote code that was not allowed.
    """
    origin = locate_model(name_or_path, revision)  # before the import, which takes seconds
    from transformers import AutoTokenizer

    if origin.is_adapter and "tokenizer_config.json" not in origin.files:
        return load_tokenizer(base_of(origin), None, trust_remote_code)
    with explained(origin.name, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            origin.name, trust_remote_code=trust_remote_code, **origin.arguments
        )
    return tokenizer


def load_model(
    name_or_path: Name,
    *,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    model_init_kwargs: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """A causal language model with the weights of a folder or hub id; an adapter folder is put on its base
    model.

    ``model_init_kwargs`` are further arguments of ``from_pretrained`` and win over the others.

    Raises:
        UserError: as :func:`load_tokenizer`; weights in pickle files (loading one can run code), weights that
            lack tensors of the architecture, quantization without a GPU.
    """
    origin = locate_model(name_or_path, revision)
    _refuse_pickle(origin)
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    if not sys.stderr.isatty():
        disable_progress_bar()  # a bar in a log is a hundred lines
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attn_implementation,
        "trust_remote_code": trust_remote_code,
    }
    if origin.is_adapter:
        base = load_model(
            base_of(origin),
            **options,
            quantization_config=quantization_config,
            model_init_kwargs=model_init_kwargs,
        )
        with explained(origin.name, "adapter"), warnings.catch_warnings():
            # peft asks transformers for names of its last version
            warnings.simplefilter("ignore", FutureWarning)
            from peft import PeftModel

            adapted: PreTrainedModel = PeftModel.from_pretrained(base, origin.name, **origin.arguments)
        return adapted
    if quantization_config is not None:
        check_quantization(True)
        options["quantization_config"] = quantization_config
    with explained(origin.name, "model"):
        model, found = AutoModelForCausalLM.from_pretrained(
            origin.name,
            **(options | origin.arguments | (model_init_kwargs or {})),
            use_safetensors=True,
            output_loading_info=True,
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"the weights lack {len(missing)} tensors of the architecture, such as {missing[0]}; they would "
            "have been random",
            where=origin.name,
            fix="give the complete folder, or correct config.json",
            code=DATA,
        )
    loaded: PreTrainedModel = model
    return loaded


def load_config(origin: Origin, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model; of an adapter, that of its base."""
    from transformers import AutoConfig

    if origin.is_adapter:
        return load_config(locate_model(base_of(origin)), trust_remote_code)
    with explained(origin.name, "config.json"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            origin.name, trust_remote_code=trust_remote_code, **origin.arguments
        )
    return config


def base_of(adapter: Origin) -> str:
    """The base model that an adapter was trained on.

    Raises:
        UserError: the adapter does not name one.
    """
    import json

    with explained(adapter.name, "adapter_config.json"):
        base = json.loads(adapter.file("adapter_config.json").read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    if not base:
        raise UserError(
            "names no base model",
            where=f"{adapter.name}/adapter_config.json",
            fix="set base_model_name_or_path",
            code=DATA,
        )
    return str(base)


def _refuse_pickle(origin: Origin) -> None:
    if any(name.endswith(".safetensors") for name in origin.files):
        return
    pickled = [name for name in origin.files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    if pickled:
        raise UserError(
            f"the weights are in {pickled[0]}, a pickle file, and loading one can run any code",
            where=origin.name,
            fix="convert it to safetensors where that code may run: model.save_pretrained(folder)",
            code=DATA,
        )
    raise UserError(
        ("holds no weights (*.safetensors)"), where=origin.name, fix="give a complete model folder", code=DATA
    )


def check_quantization(wanted: bool) -> None:
    """Refuse 4-bit and 8-bit loading (QLoRA) where it cannot work, before anything is loaded.

    Raises:
        UserError: there is no GPU, or bitsandbytes is not installed.
    """
    import importlib.util

    import torch

    if not wanted:
        return
    if not torch.cuda.is_available():
        raise UserError(
            "load_in_4bit and load_in_8bit (QLoRA) need a GPU, and this machine shows none",
            where="load_in_4bit",
            fix="run on a GPU, or leave quantization out and use LoRA alone (use_peft: true)",
            code=UNAVAILABLE,
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            ("load_in_4bit and load_in_8bit need bitsandbytes"),
            fix="pip install 'podtune[qlora]'",
            code=UNAVAILABLE,
        )


@dataclass(frozen=True)
class Parameters:
    """Counts of a model: all, those outside the input embedding, and those in matrix products for one token.

    The last leaves out an embedding that is only looked up (one tied to the head is multiplied with) and
    experts that a token is not routed to.
    """

    total: int
    non_embedding: int
    multiplied: int


def parameter_count(model_or_config: PreTrainedModel | PreTrainedConfig) -> Parameters:
    """Counted on the meta device from the configuration, so that sharded or quantized weights count as what
    they stand for.
    """
    config = _config(model_or_config)
    model = meta_model(config)
    total = sum(weight.numel() for weight in model.parameters())
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    lookup_only = head is None or head.weight is not embedding
    text = config.get_text_config()
    experts = next(
        (
            value
            for name in ("num_experts", "num_local_experts", "n_routed_experts")
            if (value := getattr(text, name, None))
        ),
        None,
    )
    idle = 0
    if experts:
        routed = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
        idle = routed * (experts - text.num_experts_per_tok) // experts
    return Parameters(
        total, total - embedding.numel(), total - idle - (embedding.numel() if lookup_only else 0)
    )


def flops_per_token(
    model_or_config: PreTrainedModel | PreTrainedConfig, sequence_length: int, *, trained_share: float = 1.0
) -> float:
    """Model FLOPs of forward and backward for one token of a row of ``sequence_length`` tokens: 6 N + 12 L H
    Q T.

    PaLM (Chowdhery et al. 2022, appendix B): N parameters in matrix products, L layers, H heads of Q, T
    tokens; attention counts all T x T products, as is usual, although a causal kernel needs half.
    Recomputation never counts. ``trained_share`` is the share of N whose weight gradients are computed: about
    0 for LoRA, where 2 of the 6 fall away.
    """
    text = _config(model_or_config).get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    attention = 12 * text.num_hidden_layers * heads * head_dim * sequence_length
    return float((4 + 2 * trained_share) * parameter_count(model_or_config).multiplied + attention)


def counted_flops_per_token(config: PreTrainedConfig, sequence_length: int) -> float | None:
    """The same counted by ``torch.utils.flop_counter`` over one row on the meta device; None for a mixture of
    experts,
    whose grouped products the counter does not know."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    parameters = parameter_count(config)
    lookup = parameters.total - parameters.non_embedding
    if parameters.multiplied not in (parameters.total, parameters.total - lookup):
        return None
    with torch.device("meta"):
        model = meta_model(config, attn_implementation="eager")
        row = torch.zeros(1, sequence_length, dtype=torch.long)
        # a ready mask: making one looks at values, which meta tensors do not have
        mask = torch.zeros(1, 1, sequence_length, sequence_length, dtype=model.dtype)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=row, attention_mask=mask, use_cache=False).logits.sum().backward()
    return float(counter.get_total_flops()) / sequence_length


def meta_model(config: PreTrainedConfig, attn_implementation: str | None = None) -> PreTrainedModel:
    """The architecture without weights: shapes only, no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    trusted = type(config).__module__.startswith("transformers_modules")  # then its code has run already
    with torch.device("meta"), explained(str(config.name_or_path or config.model_type), "architecture"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, dtype=torch.bfloat16, trust_remote_code=trusted
        )
    return model


def peak_flops(device_name: str, precision: str = "bf16") -> float | None:
    """Dense peak FLOP/s of a device by the name that torch gives it, or None if it is not known."""
    from podtune.plan import hardware

    return hardware.peak_flops(device_name, precision)


def _config(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    config: PreTrainedConfig = getattr(model_or_config, "config", model_or_config)
    return config
