#!/bin/sh
# Install the system packages of the image with the base's own package manager. For the Dockerfile:
#   os_packages.sh build|run PYTHON
set -eu
stage=$1 python=$2
if command -v apt-get >/dev/null; then
    case $stage in
    build) set -- ca-certificates "$python" "$python-venv" ;;
    run) set -- ca-certificates "$python" "$python-dev" g++ libibverbs1 ibverbs-providers ;;
    esac
    apt-get update
    apt-get install -y --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/*
    exit
fi
for manager in dnf microdnf; do command -v "$manager" >/dev/null && break; manager=; done
if [ -z "$manager" ]; then
    echo "os_packages.sh: the base image has neither apt-get nor dnf nor microdnf" >&2
    exit 69
fi
case $stage in
build) set -- ca-certificates "$python" ;;                                  # venv is a part of it there
run) set -- ca-certificates "$python" "$python-devel" gcc-c++ libibverbs shadow-utils ;;  # with its providers; useradd
esac
"$manager" install -y --setopt=install_weak_deps=0 "$@"
"$manager" clean all
