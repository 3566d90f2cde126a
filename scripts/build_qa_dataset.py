#!/usr/bin/env python3
"""Build the question-answer set: the same as ``podtune data build``, for a checkout that is not installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from podtune.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["data", "build"]
    main()
