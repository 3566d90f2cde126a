#!/bin/sh
# The tests on a GPU where there is no network and little installed: such a machine needs its own torch (2.11 or newer,
# built for its driver), Python 3.11 or 3.12, a C compiler, and what torch's image usually has beside it.
#   scripts/test_gpu.sh fetch [DIR] [PYTHON]   where there is a network: the wheels it lacks into DIR, some 30 MiB
#   scripts/test_gpu.sh run [DIR] [WORDS]      on the machine: install them beside its packages and run tests/gpu
# WORDS go to pytest: -m "not slow" leaves out what takes a large GPU. MORE names further packages to fetch.
set -eu
cd "$(dirname "$0")/.."
action=${1:?fetch or run}; shift
wheels=${1:-build/gpu-wheels}; [ $# -eq 0 ] || shift
names="transformers tokenizers huggingface-hub trl datasets multiprocess dill xxhash accelerate peft deepspeed hjson ninja
  py-cpuinfo einops msgpack pydantic pydantic-core annotated-types typing-inspection
  typer rich nvidia-ml-py pytest pytest-timeout pluggy iniconfig ${MORE:-}"

case $action in
fetch)
  python=${1:-3.12}
  mkdir -p "$wheels"
  for name in $names; do
    pinned=$(grep -E "^$name==" requirements.txt | cut -d' ' -f1 || true)
    case $name in deepspeed) kind=:none: ;; *) kind=:all: ;; esac
    DS_BUILD_OPS=0 python3 -m pip download --quiet --no-deps --dest "$wheels" --python-version "$python" \
      --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --only-binary "$kind" "${pinned:-$name}"
  done
  du -sh "$wheels" ;;
run)
  path=training
  # Not a virtual environment: one made from a virtual environment, which an image's python3 often is, does not see its torch.
  if ! python3 -c 'import trl, datasets, pytest' 2>/dev/null; then
    DS_BUILD_OPS=0 python3 -m pip install --quiet --no-index --no-deps --no-build-isolation --no-compile --upgrade \
      --target build/gpu-site "$wheels"/*
    path=training:build/gpu-site
  fi
  results=${OUT:-build}/gpu-tests.xml
  # what a run that is cut off has shown so far stands in the log; the file is written at the end
  PYTHONPATH=$path HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 exec python3 -m pytest tests/gpu -m gpu -v -rA --junitxml "$results" "$@" ;;
*) echo "usage: scripts/test_gpu.sh fetch|run [DIR] ..." >&2; exit 2 ;;
esac
