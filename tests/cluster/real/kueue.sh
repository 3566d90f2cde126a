#!/bin/sh
# Kueue for the cluster of KUBECONFIG, where no registry can give its image: the controller is built from its module and
# runs on this machine, which the API server must reach. Upstream's manifests, without their Deployment.
#   tests/cluster/real/kueue.sh up      needs Go, kubectl and an administrator's rights; ten minutes once on two cores
#   tests/cluster/real/kueue.sh down    ends the controller and takes its objects away
# Elsewhere: kubectl apply --server-side -f the manifests.yaml of the release.
set -eu
VERSION=v0.15.0
DIR=${KUEUE_DIR:-${TMPDIR:-/tmp}/podtune-kueue-$(id -u)} # source, binary, certificate, log
PORT=${KUEUE_PORT:-9446} # of its webhooks; the two ports after it are its metrics' and its probe's
SERVICE=kueue-webhook-service SECRET=kueue-webhook-server-cert

end() {
  [ -e "$DIR/pid" ] || return 0
  pid=$(cat "$DIR/pid")
  case $(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null) in "$DIR/kueue "*)
    kill "$pid"
    wait_for "end of process $pid" sh -c "! kill -0 $pid"
    ;;
  esac
  rm "$DIR/pid"
}
wait_for() { # wait_for WHAT COMMAND...
  what=$1 tries=300
  shift
  until "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || { echo "kueue.sh: no $what after 90 s; see $DIR/log" >&2 && exit 1; }
    sleep 0.3
  done
}
secret() { kubectl -n kueue-system get secret $SECRET -o "go-template={{index .data \"$1\" | base64decode}}"; }
answers() {
  echo '{apiVersion: kueue.x-k8s.io/v1beta2, kind: ResourceFlavor, metadata: {name: probe}}' | kubectl create --dry-run=server -f -
}

case ${1:-} in
up) ;;
down)
  end
  [ ! -e "$DIR/kustomization.yaml" ] || kubectl delete --ignore-not-found --wait=false -k "$DIR" >/dev/null
  exit
  ;;
*) echo "usage: $0 up|down" >&2 && exit 64 ;;
esac

mkdir -p "$DIR/certificate"
cd "$DIR"
if [ ! -x kueue ]; then
  module=$(go mod download -json sigs.k8s.io/kueue@$VERSION | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
  rm -rf source
  cp -r --no-preserve=mode "$module" source
  echo "building Kueue $VERSION"
  (cd source && go build -buildvcs=false -ldflags "-s -w" -o ../kueue ./cmd/kueue)
fi
# config/default without the visibility server: it has a port of its own and takes part in the aggregated API, and no
# namespace could be deleted while it does not answer.
cat >kustomization.yaml <<YAML
namespace: kueue-system
namePrefix: kueue-
resources:
- source/config/components/crd
- source/config/components/rbac
- source/config/components/manager
- source/config/components/internalcert
- source/config/components/webhook
patches:
- patch: |
    {apiVersion: apps/v1, kind: Deployment, metadata: {name: controller-manager, namespace: system}, \$patch: delete}
- patch: | # its webhook writes each job anew, which mends misspelt kinds and numbers: other tests ask what is refused
    apiVersion: admissionregistration.k8s.io/v1
    kind: MutatingWebhookConfiguration
    metadata: {name: mutating-webhook-configuration}
    webhooks: [{name: mpytorchjob.kb.io, namespaceSelector: {matchLabels: {kueue: "true"}}}]
YAML
cat >config.yaml <<YAML
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
namespace: kueue-system
health: {healthProbeBindAddress: "127.0.0.1:$((PORT + 2))"}
metrics: {bindAddress: "127.0.0.1:$((PORT + 1))"}
webhook: {port: $PORT, certDir: $DIR/certificate}
leaderElection: {leaderElect: false}
internalCertManagement: {enable: true, webhookServiceName: $SERVICE, webhookSecretName: $SECRET}
integrations: {frameworks: [kubeflow.org/pytorchjob]} # TrainJobs: it writes what Trainer 2.1 takes, and 2.0 does not
YAML
end
kubectl apply --server-side --force-conflicts -k . >apply.log
host=${KUEUE_HOST:-$(kubectl config view --minify -o 'jsonpath={.clusters[0].cluster.server}' | sed 's,.*//,,; s,:.*,,')}
kubectl apply -f - >/dev/null 2>&1 <<YAML
apiVersion: v1
kind: Endpoints
metadata: {name: $SERVICE, namespace: kueue-system}
subsets: [{addresses: [{ip: $host}], ports: [{port: $PORT}]}]
YAML
(umask 077 && kubectl config view --minify --raw --flatten >controller.kubeconfig)
as() { kubectl --kubeconfig controller.kubeconfig config "$@"; }
user=$(as view -o 'jsonpath={.users[0].name}')
as unset "users" >/dev/null # the administrator's: its own ServiceAccount has the rights that upstream gives it
as set-credentials "$user" --token "$(kubectl -n kueue-system create token kueue-controller-manager --duration=24h)" >/dev/null
rm -f certificate/*
KUBECONFIG=$DIR/controller.kubeconfig setsid nohup "$DIR/kueue" --config="$DIR/config.yaml" \
  --feature-gates=VisibilityOnDemand=false >log 2>&1 </dev/null &
echo $! >pid
# Its rotator writes the certificate to a Secret and waits for it where a pod would have it mounted.
wait_for "certificate of its webhooks" secret tls.crt
secret tls.key >certificate/tls.key
secret ca.crt >certificate/ca.crt
secret tls.crt >certificate/.crt && mv certificate/.crt certificate/tls.crt
wait_for "answer of its webhooks" answers
echo "Kueue $VERSION runs as process $(cat pid); its log: $DIR/log"
