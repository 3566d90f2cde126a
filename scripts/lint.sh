#!/bin/sh
# The linters: style, types, the image's recipe, and the chart with every profile. Run by `make lint`.
set -eu
ruff check .
ruff format --check .
mypy
hadolint Dockerfile
for values in deploy/values/*.yaml; do
  printf '%s: ' "$values"
  podtune render -f "$values" | podtune lint -
done
