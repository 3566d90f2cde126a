"""Build the small SmolLM3-architecture model: the same as ``podtune model build``."""

import sys

from training.commands.model import app

if __name__ == "__main__":
    app(["build", *sys.argv[1:]])
