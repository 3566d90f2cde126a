"""What a model asks of a machine, from its shape alone: parameters, FLOPs, activations, boundaries. Needs no
torch.

Activations count **elements kept for the backward pass**; the planner multiplies by the width of the
precision.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from podtune.plan.sizes import SIZES, ResNetSize, TransformerSize
from podtune.run.errors import DATA, NO_INPUT, USAGE, UserError, near

Checkpointing = Literal["none", "selective", "full", "sequential"]


@dataclass(frozen=True)
class Transformer:
    """A decoder: GPT-2 like (``gated`` False, learned ``positions``, biases) or Llama like (``gated`` True,
    neither).

    ``vocabulary`` counts the rows of the embedding; ``given_parameters`` overrides the count where the caller
    knows better.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    sequence_length: int
    head_dim: int
    gated: bool = True
    tied: bool = True
    positions: int = 0
    biases: bool = False
    given_parameters: int | None = None

    sample = "sequence"

    @property
    def attention_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of a layer's linear maps: query, key, value, output, then the MLP's."""
        h, q, kv, i = self.hidden, self.attention_width, self.kv_heads * self.head_dim, self.intermediate
        mlp = ((h, i), (h, i), (i, h)) if self.gated else ((h, i), (i, h))
        return ((h, q), (h, kv), (h, kv), (q, h), *mlp)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: linear maps, their biases, two norms."""
        weights = sum(inputs * outputs + (outputs if self.biases else 0) for inputs, outputs in self.linears)
        return weights + 2 * self.hidden * (2 if self.biases else 1)

    @property
    def parameters(self) -> int:
        """All parameters; tied embeddings once."""
        if self.given_parameters is not None:
            return self.given_parameters
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2) + self.positions * self.hidden
        return embeddings + self.layers * self.layer_parameters + self.hidden * (2 if self.biases else 1)

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward FLOPs of one sequence: 6 a weight and token, and attention's 12 L d T a token.

        PaLM (Chowdhery et al. 2022), appendix B, which counts the whole T x T square also under a causal
        mask. Looking up an embedding is free; the output head is not.
        """
        weights = (
            self.layers * sum(inputs * outputs for inputs, outputs in self.linears)
            + self.vocabulary * self.hidden
        )
        return self.sequence_length * (
            6.0 * weights + 12.0 * self.layers * self.attention_width * self.sequence_length
        )

    @property
    def units(self) -> int:
        """Blocks that are wrapped, cut or checkpointed one by one."""
        return self.layers

    @property
    def divisible(self) -> int:
        """Parameters that tensor parallelism divides: the layers' linear maps. Embedding, head and norms stay
        whole.
        """
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears)

    def lora_parameters(self, rank: int) -> int:
        """Trainable parameters of LoRA of ``rank`` on every linear map of every layer (Hu et al. 2021,
        section 4.1).
        """
        return self.layers * sum(rank * (inputs + outputs) for inputs, outputs in self.linears)

    def layer_elements(self, checkpointing: Checkpointing = "none", tensor_ranks: int = 1) -> float:
        """Elements that one layer keeps for one sequence.

        Korthikanti et al. 2022 (Reducing Activation Recomputation), section 4.1, without dropout's masks,
        with flash attention (no T x T scores; its log-sum-exp is one fp32 a head and token, here two
        elements), grouped key and value heads and, for a gated MLP, four tensors of its width (gate, up,
        activated gate, product) in place of two. For GPT-2's shape this is 16 h a token: the paper's 34 s b h
        bytes less its two bytes of masks. Over ``tensor_ranks`` everything is split but the norms' and the
        linear maps' full-width inputs (equation 2).
        """
        h, q, kv = self.hidden, self.attention_width, self.kv_heads * self.head_dim
        if checkpointing in ("full", "sequential"):
            return float(self.boundary_elements)
        # q, k, v, context, up (gate)
        matmuls = q + 2 * kv + q + 2 * self.heads + (2 if self.gated else 1) * self.intermediate
        pointwise = (2 if self.gated else 1) * self.intermediate  # activated (gate, product)
        full_width = 4 * h  # two norms' inputs, and their outputs, which the linear maps keep
        # the layer's input and what the matmuls and attention gave; the rest is computed again
        if checkpointing == "selective":
            return self.sequence_length * (3.0 * h + matmuls / tensor_ranks)
        return self.sequence_length * (full_width + (matmuls + pointwise) / tensor_ranks)

    @property
    def head_elements(self) -> int:
        """Logits of one sequence."""
        return self.sequence_length * self.vocabulary

    @property
    def boundary_elements(self) -> int:
        """Elements that cross from one layer to the next for one sequence."""
        return self.sequence_length * self.hidden

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest unit that FSDP gathers at once."""
        return max(self.layer_parameters, self.parameters - self.layers * self.layer_parameters)


@dataclass(frozen=True)
class ConvNet:
    """A convolutional network as a list of (input channels, output channels, kernel, output side) and a
    classifier.
    """

    convolutions: tuple[tuple[int, int, int, int], ...]
    features: int
    classes: int
    blocks: int
    boundary: int

    sample = "image"

    @property
    def parameters(self) -> int:
        """Convolutions without bias, batch norm's gain and bias, the classifier with bias."""
        weights = sum(k * k * inputs * outputs + 2 * outputs for inputs, outputs, k, _ in self.convolutions)
        return weights + (self.features + 1) * self.classes

    @property
    def flops_per_sample(self) -> float:
        """Forward and backward FLOPs of one image: three times 2 k^2 C_in C_out H W a convolution."""
        forward = sum(
            2.0 * k * k * inputs * outputs * side * side for inputs, outputs, k, side in self.convolutions
        )
        return 3 * (forward + 2.0 * self.features * self.classes)

    @property
    def units(self) -> int:
        """Residual blocks."""
        return self.blocks

    divisible = 0  # convolutions are not divided

    def layer_elements(self, checkpointing: Checkpointing = "none", tensor_ranks: int = 1) -> float:
        """Elements that one block keeps for one image, on average: each convolution's output twice (before
        and after norm).
        """
        kept = 2.0 * sum(outputs * side * side for _, outputs, _, side in self.convolutions) / self.blocks
        # of the tensors of a block, its input alone is kept
        checkpoints = len(self.convolutions) / self.blocks * 2
        return kept / checkpoints if checkpointing in ("full", "sequential") else kept / tensor_ranks

    @property
    def head_elements(self) -> int:
        """Scores of one image."""
        return self.classes

    @property
    def boundary_elements(self) -> int:
        """Elements that cross the cut in the middle of the network for one image."""
        return self.boundary

    @property
    def largest_unit(self) -> int:
        """Parameters of the largest block, about: the last stage's share."""
        return max(k * k * inputs * outputs for inputs, outputs, k, _ in self.convolutions) * 2

    def lora_parameters(self, rank: int) -> int:
        """LoRA is for transformers.

        Raises:
            UserError: always.
        """
        raise UserError(
            "LoRA needs a transformer", where="--lora-r", fix="leave it out for a ResNet", code=USAGE
        )


@dataclass(frozen=True)
class Opaque:
    """A model of which only the count of parameters is known: no activations, 6 FLOPs a parameter and
    token.
    """

    parameters: int
    sequence_length: int = 1024

    sample = "sequence"
    units = 1
    head_elements = 0
    boundary_elements = 0
    largest_unit = 0

    @property
    def divisible(self) -> int:
        """Taken as all, for want of the shape."""
        return self.parameters

    @property
    def flops_per_sample(self) -> float:
        """6 N a token (Kaplan et al. 2020, section 2.1)."""
        return 6.0 * self.parameters * self.sequence_length

    def layer_elements(self, checkpointing: Checkpointing = "none", tensor_ranks: int = 1) -> float:
        """Unknown, hence not counted."""
        return 0.0

    def lora_parameters(self, rank: int) -> int:
        """The shape decides how large adapters are.

        Raises:
            UserError: always.
        """
        raise UserError(
            ("LoRA's size follows from the layers' shapes"),
            where="--lora-r",
            fix="give --model instead of --params",
            code=USAGE,
        )


Shape = Transformer | ConvNet | Opaque

# Reference models of the chart's profiles, as their config.json on the hub says.
KNOWN: dict[str, Transformer] = {
    "SmolLM3-3B": Transformer(
        layers=36,
        hidden=2048,
        heads=16,
        kv_heads=4,
        intermediate=11008,
        vocabulary=128256,
        sequence_length=2048,
        head_dim=128,
    )
}


def shape_of(name: str, sequence_length: int | None = None) -> Shape:
    """The shape of a benchmark model, a known model, ``hf:PATH`` or a folder with a config.json.

    Raises:
        UserError: unknown name (names the nearest), a missing folder, or a config.json that is not a
        decoder's.
    """
    if name in SIZES:
        return _from_size(SIZES[name], sequence_length)
    short = name.removeprefix("hf:").rstrip("/").rsplit("/", 1)[-1]
    path = Path(name.removeprefix("hf:")).expanduser()
    if path.is_dir() or path.name == "config.json":
        return _from_config(path if path.name == "config.json" else path / "config.json", sequence_length)
    if short in KNOWN:
        known = KNOWN[short]
        return (
            known
            if sequence_length is None
            else Transformer(**{**known.__dict__, "sequence_length": sequence_length})
        )
    if name.startswith("hf:"):
        raise UserError(
            f"no folder {path}",
            where="--model",
            fix=("give a local folder with a config.json (nothing is downloaded)"),
            code=NO_INPUT,
        )
    names = [*SIZES, *KNOWN]
    raise UserError(
        f"unknown model '{name}'{near(name, names)}",
        where="--model",
        fix=f"one of {', '.join(names)}, or hf:PATH of a folder with a config.json",
        code=USAGE,
    )


def _from_size(size: TransformerSize | ResNetSize, sequence_length: int | None) -> Shape:
    if isinstance(size, ResNetSize):
        return _resnet(size)
    return Transformer(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        kv_heads=size.heads,
        intermediate=size.intermediate,
        vocabulary=size.padded_vocabulary,
        sequence_length=sequence_length or size.sequence_length,
        head_dim=size.hidden // size.heads,
        gated=False,
        positions=size.sequence_length,
        biases=True,
    )


def _resnet(size: ResNetSize) -> ConvNet:
    """He et al. 2015 (Deep Residual Learning), table 1; the bottleneck's stride sits in its 3 x 3
    convolution.
    """
    large = size.stem == "7x7"
    side = size.image_size // 2 if large else size.image_size
    convolutions = [(3, 64, 7 if large else 3, side)]
    side = side // 2 if large else side
    channels = 64
    boundary = 0
    for stage, (width, count) in enumerate(zip(size.WIDTHS, size.blocks, strict=True)):
        for block in range(count):
            before, outputs = side, width * size.expansion
            if stage and not block:
                side = math.ceil(side / 2)
            if size.block == "basic":
                convolutions += [(channels, width, 3, side), (width, width, 3, side)]
            else:
                convolutions += [
                    (channels, width, 1, before),
                    (width, width, 3, side),
                    (width, outputs, 1, side),
                ]
            if channels != outputs:
                convolutions.append((channels, outputs, 1, side))
            channels = outputs
        if stage == 1:
            boundary = channels * side * side
    return ConvNet(
        tuple(convolutions),
        features=channels,
        classes=size.classes,
        blocks=sum(size.blocks),
        boundary=boundary,
    )


def _from_config(path: Path, sequence_length: int | None) -> Transformer:
    """A transformers ``config.json``, by the names that Llama-like and GPT-2-like models give their sizes."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            "no such file", where=str(path), fix=("give the folder of a transformers model"), code=NO_INPUT
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read as JSON: {error}", where=str(path), code=DATA) from None

    def integer(*names: str, default: int | None = None) -> int:
        value: Any = next((config[name] for name in names if config.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(
                f"{names[0]} is {value!r}, not a positive number",
                where=str(path),
                fix="give the folder of a decoder (Llama, SmolLM3, Qwen, GPT-2 ...)",
                code=DATA,
            )
        return value

    if any(config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts")):
        raise UserError(
            ("a mixture of experts is not covered by these formulas"),
            where=str(path),
            fix="give --params for the states alone",
            code=DATA,
        )
    gpt2 = config.get("model_type") in ("gpt2", "gpt_neo", "gptj", "gpt_neox", "opt")
    hidden, heads = integer("hidden_size", "n_embd"), integer("num_attention_heads", "n_head")
    positions = integer("max_position_embeddings", "n_positions", default=2048)
    return Transformer(
        layers=integer("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=integer("num_key_value_heads", default=heads),
        intermediate=integer("intermediate_size", "n_inner", default=4 * hidden),
        vocabulary=integer("vocab_size"),
        sequence_length=sequence_length or min(positions, 2048),
        head_dim=integer("head_dim", default=hidden // heads),
        gated=not gpt2,
        # transformers leaves the key out where it has its default, which is "tied" for GPT-2 and the SmolLM
        # family
        tied=bool(config.get("tie_word_embeddings", gpt2 or config.get("model_type") == "smollm3")),
        positions=positions if config.get("model_type") in ("gpt2", "gpt_neo", "opt") else 0,
        biases=gpt2,
    )
