"""What the launcher's server has done before it forks a program: the imports, the first uses that fill
caches, and its own objects put where no child's garbage collection looks at them.
"""

import gc
import importlib

import torch

from podtune.run.library_environment import import_peft

import_peft(quantized=False)
for name in (
    "podtune.sft.config.resolve",
    "podtune.sft.train.build",
    "podtune.sft.train.run_folder",
    "podtune.sft.data.rows",
    "podtune.sft.model.load",
    "podtune.commands.launch",
    "podtune.commands.preflight",
    "podtune.pod.rendezvous",
    "podtune.pod.compute",
    "torch.distributed.run",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "transformers.models.smollm3.modeling_smollm3",
):
    importlib.import_module(name)
with torch.device("meta"):  # as a model is made before its weights are read
    torch.nn.Linear(2, 2)
gc.collect()
gc.freeze()
