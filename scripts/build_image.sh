#!/bin/sh
# Build the image with docker, podman or buildah, whichever is there.
#
#   scripts/build_image.sh [TAG]                                  # localhost/podtune:VERSION
#   BASE_IMAGE=localhost/debian:bookworm scripts/build_image.sh   # from an image of your own, without a registry
#   BASE_IMAGE=registry.example/ubi9 PYTHON=python3.12 scripts/build_image.sh   # a base with dnf, whose python3 is too old
#   EXTRAS="train aim" scripts/build_image.sh                     # less in it: no DeepSpeed, no bitsandbytes
#   FIND_LINKS=URL scripts/build_image.sh                         # a page of wheels that win: torch for the CPU alone, or for CUDA 12
#   BUILDER=buildah scripts/build_image.sh                        # this one, though others are there
#
# SSL_CERT_FILE, where it is set, is lent to the build (as a secret) for networks with a certificate of their own.
set -eu
cd "$(dirname "$0")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
tag=${1:-localhost/podtune:$version}

usable() { # docker alone cannot mount caches and secrets; that takes buildx and a daemon
    if [ "$1" = docker ]; then docker buildx version && docker info; else command -v "$1"; fi >/dev/null 2>&1
}
for builder in ${BUILDER:-docker podman buildah}; do
    usable "$builder" && break
    builder=
done
if [ -z "$builder" ]; then
    echo "build_image.sh: needs docker (with buildx), podman or buildah" >&2
    exit 69
fi

sha=$(git rev-parse HEAD 2>/dev/null || true)
if [ -n "$sha" ] && [ -n "$(git status --porcelain --untracked-files=no)" ]; then sha=$sha-dirty; fi

set -- --tag "$tag" --build-arg "GIT_SHA=$sha"
for name in BASE_IMAGE PYTHON EXTRAS FIND_LINKS; do
    value=$(printenv "$name" || true)
    if [ -n "$value" ]; then set -- "$@" --build-arg "$name=$value"; fi
done
if [ -s "${SSL_CERT_FILE:-}" ]; then set -- "$@" --secret "id=ca,src=$SSL_CERT_FILE"; fi

case $builder in
docker) docker buildx build --load "$@" . ;;
podman) podman build "$@" . ;;
# --layers keeps the long steps for the next build
buildah) buildah build --layers "$@" . ;;
esac
echo "built $tag"
