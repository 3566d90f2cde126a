"""Kernels for training on a CPU, which a fine-tune on a GPU does not run and its reader may skip.

Purpose
    Demos, tests and small models train on CPUs: a laptop, a cluster without a free GPU, two pods of kind.
    torch and TRL are written for GPUs, and on a CPU most of a short step is not matrix products but copies,
    paddings and kernels that are compiled for a shape which never comes again. This room holds what was worth
    its lines. Whatever else makes podtune faster than plain TRL (batches without padding, logits at scored
    positions only, no checkpointing of activations) helps a GPU, too, and is elsewhere.

Parts
    ``attention``
        Causal attention of each row of a padding-free batch to itself, forward and backward as one step of
        autograd. Called by :mod:`podtune.sft.model.attention` for tensors on a CPU.
        Shown equal to SDPA under a block-diagonal mask, values and gradients, in fp32 to 1e-6; in bf16 it
        stays within bf16's rounding of that.
    ``rms_norm``
        RMSNorm in bf16 training as one step of autograd instead of eight, its result rounded once instead of
        once for each layer that reads it. A model's norm is replaced only if it computes the same on random
        numbers. Shown equal to transformers' own bit by bit after the rounding, gradients to 1e-5.
    ``cross_entropy``
        The summed loss a few rows at a time, so that no copy of all logits in fp32 is made. Called by
        :mod:`podtune.sft.train.loss`. Shown equal to ``torch.nn.functional.cross_entropy``, value to 1e-6.
    ``padded_batches``
        Padding-free batches padded to a multiple of tokens, so that oneDNN compiles few kernels instead of
        one for each length. The padding is a row of its own, which is neither trained on nor attended to.
        Shown equal: loss and gradients are those of the rows alone.
    ``heap_trim``
        glibc's heap held while training lasts, and trimmed every few micro-batches. Changes no number; that
        resident memory stays flat over ever new lengths is tested in a process of its own.

How to change it
    ``tests/sft/cpu`` holds the parts, ``tests/sft/model/test_attention.py`` and
    ``tests/sft/train/test_loss.py`` what calls them. ``python benchmarks/sft_vs_trl.py`` and
    ``benchmarks/resident_memory.py`` measure time and memory beside plain TRL: a part that no longer pays
    should go. Shapes, dtypes and devices that a part does not know take torch's own path, so each can be
    deleted on its own.

Who enters it all the same
    ``pad_to_multiple_of``, set by hand, pads batches on any device by ``padded_batches``; unset, a GPU's are
    never padded.
"""
