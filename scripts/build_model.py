"""Build the small SmolLM3-architecture model: the same as ``podtune model build``."""

import sys

from training.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["model", "build"]
    main()
