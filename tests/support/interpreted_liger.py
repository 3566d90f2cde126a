"""podtune.training where Triton's interpreter runs Liger's kernels on the CPU (TRITON_INTERPRET=1).

Three gaps of Triton 3.7's interpreter are filled: numbers with a point reach a kernel as they are in Python,
without ``to``; the square root that Liger takes from libdevice returns nothing; and numbers of 16 bits are
multiplied as integers, which is left so: there the kernels are wrong, and have to be refused.
``WRONG_KERNEL`` makes a kernel wrong (``norm``) or unable to run (``raises``), the latter on a rank named so.
"""

import os
import sys
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import liger_kernel.ops.rms_norm as norm
import liger_kernel.ops.swiglu as swiglu
import numpy
import triton.language as tl
from triton.runtime import interpreter

from podtune.training import main as train

WRONG = os.environ.get("WRONG_KERNEL", "")
_converted = interpreter._implicit_cvt


def _with_floats(argument: Any) -> Any:
    if isinstance(argument, float):
        handle = interpreter.TensorHandle(numpy.array([argument], dtype=numpy.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return _converted(argument)


def _no_sigmoid(_: Any) -> Any:
    raise RuntimeError("no compiler here\nwith many lines")


interpreter._implicit_cvt = _with_floats
norm.rsqrt = lambda x: tl.rsqrt(x) * (1.001 if WRONG == "norm" else 1.0)
if WRONG == "raises":
    swiglu.silu = _no_sigmoid

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
