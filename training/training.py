"""The fine-tune by path: ``torchrun training/training.py ...`` is ``torchrun -m podtune.training ...``."""

import runpy

if __name__ == "__main__":
    runpy.run_module("podtune.training", run_name="__main__", alter_sys=True)
