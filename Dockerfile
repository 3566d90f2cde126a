# The image of every pod: training, preparation, benchmark, Aim page. scripts/build_image.sh builds it with what is there.
#
# Any Debian or Ubuntu whose python3 is 3.11 to 3.13, or a base with dnf or microdnf and `PYTHON` one that it has. CUDA 13 comes with torch's wheels, so no CUDA base is needed; the driver
# comes from the node and has to be 580 or newer. Elastic fabrics need a base with their NCCL plugin: AWS EFA its
# aws-ofi-nccl, Google's GPUDirect its own. docs/cluster.md has both, and CUDA 12 for older drivers.
ARG BASE_IMAGE=debian:bookworm-slim
ARG PYTHON=python3

FROM ${BASE_IMAGE} AS dependencies
ARG PYTHON
# The extras of pyproject.toml that go in: `train`, `aim` for the page, `deepspeed` for the benchmark's zero2 and zero3, `qlora` for 4-bit weights and
# 8-bit optimizers, `liger` for its kernels of norms, positions and SwiGLU, `s3` for object storage.
ARG EXTRAS="train aim deepspeed qlora liger s3"
# A page of wheels that win over the index, for example torch's for the CPU alone. Their hashes are not in requirements.txt.
ARG FIND_LINKS=""
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never UV_NO_CONFIG=1 UV_HTTP_TIMEOUT=180 VIRTUAL_ENV=/opt/podtune
# Versions of system packages are the base image's choice: pin the base by digest to pin them.
RUN --mount=type=bind,source=scripts/os_packages.sh,target=/tmp/os_packages.sh sh /tmp/os_packages.sh build "$PYTHON"
WORKDIR /src
COPY requirements.txt pyproject.toml ./
# uv itself by its pinned hash, then everything else by theirs; what requirements.txt does not know ends the build. A certificate
# of the network, if one is given, is a secret of the build and stays out of the image.
RUN --mount=type=cache,target=/root/.cache --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca PIP_CERT=/run/secrets/ca; fi \
 && "$PYTHON" -m venv /opt/uv && "$PYTHON" -m venv --without-pip "$VIRTUAL_ENV" \
 && sed -n '/^uv==/,/[^\\]$/p' requirements.txt > /tmp/uv.txt \
 && /opt/uv/bin/pip install --require-hashes -r /tmp/uv.txt \
 && for extra in $EXTRAS; do set -- "$@" "--extra=$extra"; done \
 && /opt/uv/bin/uv pip install --constraint requirements.txt --build-constraint requirements.txt -r pyproject.toml "$@" \
      ${FIND_LINKS:+--find-links "$FIND_LINKS" --no-verify-hashes} \
 && if [ -z "$FIND_LINKS" ]; then \
      /opt/uv/bin/uv pip freeze > /tmp/installed.txt \
   && sed -n 's/^\([^ #]*==[^ ;\\]*\).*/\1/p' requirements.txt > /tmp/pinned.txt \
   && if grep -vxFf /tmp/pinned.txt /tmp/installed.txt; then echo "these are not in requirements.txt" >&2; exit 65; fi; \
    fi

FROM dependencies AS code
COPY hatch_build.py README.md LICENSE ./
COPY training training
COPY charts charts
COPY deploy deploy
RUN --mount=type=cache,target=/root/.cache --mount=type=secret,id=ca \
    if [ -s /run/secrets/ca ]; then export SSL_CERT_FILE=/run/secrets/ca; fi \
 && /opt/uv/bin/uv pip install --no-deps --build-constraint requirements.txt --target /opt/code .

FROM ${BASE_IMAGE}
ARG PYTHON
# g++ and Python's headers: Triton compiles the launchers of its kernels, those of torch.compile and of the fused loss of
# every run on a GPU. The verbs library and its providers are what
# NCCL looks for on InfiniBand and RoCE.
RUN --mount=type=bind,source=scripts/os_packages.sh,target=/tmp/os_packages.sh sh /tmp/os_packages.sh run "$PYTHON" \
 && useradd --uid 1000 --gid 0 --create-home podtune \
 && mkdir -p /models /data /outputs /aim \
 && chown 1000:0 /models /data /outputs /aim && chmod -R g=u /models /data /outputs /aim /home/podtune
# Two layers: a change of the code moves kilobytes over the network, not the gigabytes of torch.
COPY --from=dependencies /opt/podtune /opt/podtune
COPY --from=code /opt/code /opt/code
COPY --chmod=755 scripts/entrypoint.sh /usr/local/bin/entrypoint
ARG GIT_SHA=""
# USER and LOGNAME: a cluster may choose any UID (OpenShift), which has no entry in /etc/passwd to ask for a name.
# /usr/local/nvidia: where nodes without NVIDIA's container runtime (GKE) put the driver.
ENV PATH=/opt/code/bin:/opt/podtune/bin:$PATH:/usr/local/nvidia/bin LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    PYTHONPATH=/opt/code HOME=/home/podtune USER=podtune LOGNAME=podtune \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/models/huggingface HF_HUB_DISABLE_TELEMETRY=1 AIM_UI_TELEMETRY_ENABLED=0 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONSAFEPATH=1 PODTUNE_GIT_SHA=${GIT_SHA}
LABEL org.opencontainers.image.title=podtune \
      org.opencontainers.image.description="Fine-tunes small language models on Kubernetes; needs NVIDIA driver 580 on GPU nodes" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.revision=${GIT_SHA}
USER 1000:0
# Never a volume: a Python file that somebody left there would be imported by what starts there.
WORKDIR /tmp
# The job's exit code is the health of a training pod; a probe could only be wrong.
HEALTHCHECK NONE
ENTRYPOINT ["entrypoint"]
CMD ["podtune", "--help"]
