#!/bin/sh
# The linters: style, types, the chart, the shell of nobody. Run by `make lint`.
set -eu
ruff check .
ruff format --check .
mypy
