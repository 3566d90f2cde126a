"""Kernels for training on a CPU, which a fine-tune on a GPU does not run and its reader may skip.

torch and TRL are written for GPUs: on a CPU most of a short step is not matrix products but copies, paddings
and kernels compiled for a shape which never comes again. Each file replaces one of these, and its docstring
says what and how equal; shapes, dtypes and devices that it does not know take torch's own path, so each can
be deleted on its own. ``python benchmarks/sft_vs_trl.py`` and ``benchmarks/resident_memory.py`` measure time
and memory beside plain TRL: a part that no longer pays should go.

A GPU's batches enter ``padded_batches`` if ``pad_to_multiple_of`` is set by hand.
"""
