"""Build the small SmolLM3-architecture model: the same as ``podtune model build``."""

import sys

from podtune.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["model", "build"]
    main()
