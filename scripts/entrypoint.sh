#!/bin/sh
# Runs what it is given as process 1, so that SIGTERM reaches it: podtune ..., torchrun -m podtune.training ...
# Once `podtune prepare` has filled the models volume nothing needs the hub: a name that does not resolve costs no wait then.
set -eu
if [ -e "$HF_HOME/.podtune-prepared" ]; then
    export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
fi
exec "$@"
