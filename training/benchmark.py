"""One measured cell by path: ``torchrun training/benchmark.py ...`` is ``torchrun -m podtune.benchmark
...``.
"""

import runpy

if __name__ == "__main__":
    runpy.run_module("podtune.benchmark", run_name="__main__", alter_sys=True)
