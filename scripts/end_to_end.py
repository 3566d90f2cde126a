"""Write training/podtune/sft/model/end_to_end.json: the architectures whose rows may lie end to end.

    python scripts/end_to_end.py             # after a new transformers; six minutes on two quiet cores
    python scripts/end_to_end.py LlamaForCausalLM ...    # these again, the rest as it stands

Every causal architecture of transformers is built small and trained three steps twice: padded, with its own
attention and a plain cross-entropy; and as podtune would, rows end to end and padded, with its attention and
its loss. Where losses and gradient norms agree to rounding the architecture is listed; the others run padded,
with their own attention and TRL's loss, and the file says why. A listed one is built again for each further
kind of layer that its code knows (full, sliding, chunked, ...), and is listed with those that agree too.
Every training reads that file when it starts: none should run from this tree meanwhile.
"""

from __future__ import annotations

import copy
import inspect
import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from podtune.sft.model.attention import PER_ROW, register_attention
from podtune.sft.model.end_to_end import layer_kinds
from podtune.sft.train.loss import IGNORED, _plain

TARGET = Path(__file__).resolve().parents[1] / "training/podtune/sft/model/end_to_end.json"
LENGTHS = (7, 19, 12)
STEPS = 3
TOLERANCE = 2e-5  # relative, of losses and gradient norms in fp32
SECONDS = 60
# Small everywhere; a configuration takes the names that it has.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 64),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("head_dim", "rotary_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_seq_len"), 64),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "sliding_window_size"), 5),
    **dict.fromkeys(("mamba_d_state", "state_size", "mamba_n_groups"), 8),
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
    "hidden_size_per_layer_input": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "attention_chunk_size": 6,
    "floor_scale": 4,  # Llama 4's temperature rises with the position, in steps of so many tokens
    "index_block_size": 4,  # the sparse layers of MiniMax-M3: blocks, and how many of them are seen
    "index_topk_blocks": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small_config(model_type: str, kind: str = "") -> Any:
    """A configuration of a few thousand parameters, every second layer of ``kind`` where one is named."""
    text = CONFIG_MAPPING[model_type]().get_text_config()
    wanted: dict[str, Any] = {
        name: size for name, size in SMALL.items() if isinstance(own(text, name), int | None)
    }
    if "qk_rope_head_dim" in wanted:
        wanted.pop("head_dim", None)  # of the part with positions alone
    if "kv_lora_rank" in wanted and "num_key_value_heads" in wanted:
        wanted["num_key_value_heads"] = wanted["num_attention_heads"]  # one a head, in latent attention
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "block_types"):
        kinds = own(text, name)
        if isinstance(kinds, list) and kinds:
            wanted[name] = (list(dict.fromkeys(kinds)) * 4)[:4]  # every kind of layer
    if kind and not isinstance(own(text, "layer_types"), list):  # one window for all layers, or none
        return type(text)(**{**wanted, "sliding_window": 5 if kind == "sliding_attention" else None})
    if kind:
        others = [other for other in wanted["layer_types"] if other != kind]
        wanted["layer_types"] = [kind, *others[:1], kind, *others[:1], kind, kind][:4]
        if own(text, "use_sliding_window") != ():
            wanted |= {"use_sliding_window": kind == "sliding_attention"}
    return type(text)(**wanted)


def other_kinds(model_type: str) -> list[str]:
    """The kinds of layers that a class knows, by its code, beside those of its default configuration."""
    config = small_config(model_type)
    code = "".join(
        inspect.getsource(inspect.getmodule(part))  # type: ignore[arg-type]
        for part in (type(config), MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    )
    known = [kind for kind in ALLOWED_ATTN_LAYER_TYPES if f'"{kind}"' in code]
    if not isinstance(own(config, "layer_types"), list):
        known = ["full_attention", "sliding_attention"] if own(config, "sliding_window") != () else []
    return [kind for kind in known if kind not in layer_kinds(config)]


def own(config: Any, name: str) -> Any:
    """A value that a configuration has and lets be set, else an empty tuple."""
    described = getattr(type(config), name, None)
    if isinstance(described, property) and described.fset is None:
        return ()
    try:
        return getattr(config, name, ())
    except RuntimeError:  # one that differs from layer to layer
        return ()


def batches() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same rows padded, and end to end as TRL's collator lays them."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 96, (length,), generator=generator) for length in LENGTHS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = ids.masked_fill(mask == 0, IGNORED)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    joined = torch.cat(rows)[None]
    first = positions == 0
    return (
        {"input_ids": ids, "attention_mask": mask, "labels": labels},
        {"input_ids": joined, "position_ids": positions, "labels": joined.masked_fill(first, IGNORED)},
    )


def trained(model: Any, inputs: dict[str, torch.Tensor], *, lean: bool) -> list[float]:
    """Losses and gradient norms of three steps."""
    figures = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        if lean:
            total, _, scored = _plain(model, {**inputs, "use_cache": False}, accuracy=False, multiple=1)
        else:
            labels = inputs["labels"][:, 1:]
            rest = {key: value for key, value in inputs.items() if key != "labels"}
            logits = model(**rest, use_cache=False).logits[:, :-1].float()
            scored = (labels != IGNORED).sum()
            total = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        loss = total / scored
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.stack([weight.grad.norm() for weight in model.parameters() if weight.grad is not None])
        optimizer.step()
        figures += [float(loss.detach()), float(norm.norm())]
    return figures


def own_model(config: Any, attention: str | None = None) -> Any:
    """The model with its own attention, with weights that are large enough for attention to matter."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
    ).eval()  # no dropout; gradients flow
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4) if weight.dim() > 1 else None
    return model


def judged(config: Any) -> str:
    """Empty if all three ways agree, else what differs."""
    plain = own_model(config)
    if "logits_to_keep" not in inspect.signature(type(plain).forward).parameters:
        return "the model cannot leave out logits"
    weights = copy.deepcopy(plain.state_dict())
    padded, end_to_end = batches()
    expected = trained(plain, padded, lean=False)
    for what, inputs in (("end to end", end_to_end), ("padded", padded)):
        # as from_pretrained does it: a model may refuse the name, or not know it
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=PER_ROW
        ).eval()
        model.load_state_dict(weights)
        found = trained(model, inputs, lean=True)
        apart = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(found, expected, strict=True))
        if not apart <= TOLERANCE:
            return f"{what}: losses or gradient norms differ by {apart:.0e}"
    return ""


def reason_of(model_type: str, kind: str = "") -> str:
    """:func:`judged` within :data:`SECONDS`; an error is a reason, too."""
    signal.alarm(SECONDS)
    try:
        return judged(small_config(model_type, kind))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    finally:
        signal.alarm(0)


def main() -> None:
    register_attention()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("took too long")))
    asked = sys.argv[1:]
    before = json.loads(TARGET.read_text(encoding="utf-8")) if asked else {"equal": {}, "others": {}}
    equal: dict[str, list[str]] = before["equal"]
    others: dict[str, str] = before["others"]
    for name in asked:
        equal.pop(name, None)
        others.pop(name, None)
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = names if isinstance(names, str) else names[0]
        if asked and name not in asked:
            continue
        reason = reason_of(model_type)
        print(f"{name:<40} {reason or 'equal'}", file=sys.stderr, flush=True)
        if reason:
            others[name] = reason
        else:
            kinds = set(layer_kinds(small_config(model_type)))
            for kind in other_kinds(model_type):
                why = reason_of(model_type, kind)
                print(f"{name:<40} {kind}: {why or 'equal'}", file=sys.stderr, flush=True)
                kinds |= set() if why else {kind}
            # two types of one class agree only if both do
            equal[name] = sorted(kinds & set(equal.get(name, kinds)))
        for each in others:
            equal.pop(each, None)
        content = {
            "transformers": transformers.__version__,
            "equal": dict(sorted(equal.items())),
            "others": dict(sorted(others.items())),
        }
        TARGET.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
