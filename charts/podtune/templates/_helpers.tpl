{{/* The run's name: the release's, unless overridden. Everything that the chart makes starts with it. */}}
{{- define "podtune.name" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end }}

{{- define "podtune.selectorLabels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name }}
app.kubernetes.io/instance: {{ include "podtune.name" . }}
{{- end }}

{{- define "podtune.labels" -}}
{{ include "podtune.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "podtune.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{- define "podtune.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "podtune.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end }}

{{/* Where the run's own files go. */}}
{{- define "podtune.outputDir" -}}
{{ .Values.persistence.output.mountPath }}/{{ include "podtune.name" . }}
{{- end }}

{{- define "podtune.elastic" -}}
{{- if .Values.distributed.elastic.maxNodes }}true{{ end -}}
{{- end }}

{{- define "podtune.prepare" -}}
{{- if and .Values.prepare.enabled (eq .Values.mode "sft") }}true{{ end -}}
{{- end }}

{{/* Name of a volume's claim. Call with (dict "root" $ "key" "models"). */}}
{{- define "podtune.claimName" -}}
{{- $volume := index .root.Values.persistence .key -}}
{{ $volume.existingClaim | default (printf "%s-%s" (include "podtune.name" .root) .key) }}
{{- end }}

{{/* Volumes that the pods of the job mount, in the order of their mounts. Benchmarks make their own data. */}}
{{- define "podtune.jobVolumes" -}}
{{- if eq .Values.mode "sft" }}models data output{{ else }}models output{{ end -}}
{{- end }}

{{/* The one file of the ConfigMap, as YAML of name and content, exactly as given; empty where a preset says it all. */}}
{{- define "podtune.configFile" -}}
{{- if eq .Values.mode "sft" }}
{{- dict "config.yaml" .Values.config | toYaml }}
{{- else if .Values.benchmark.sweep }}
{{- dict "sweep.yaml" .Values.benchmark.sweep | toYaml }}
{{- end }}
{{- end }}

{{/* A quantity of CPU as a whole number of threads, at least 1: "7500m" is 7. */}}
{{- define "podtune.wholeCpus" -}}
{{- $cpu := toString . -}}
{{- if hasSuffix "m" $cpu -}}
{{ max 1 (div (trimSuffix "m" $cpu | int) 1000) }}
{{- else -}}
{{ max 1 (floor (float64 $cpu) | int) }}
{{- end -}}
{{- end }}

{{/* The command of the training container: an argv, no shell, so that SIGTERM reaches the program. */}}
{{- define "podtune.command" -}}
{{- if eq .Values.mode "benchmark" }}
- podtune
- bench
- run
- --in-job
{{- if .Values.benchmark.sweep }}
- --sweep
- /etc/podtune/sweep.yaml
{{- else }}
- --preset
- {{ .Values.benchmark.preset | quote }}
{{- end }}
- --output
- {{ include "podtune.outputDir" . | quote }}
{{- if .Values.preflight.enabled }}
- --preflight
- --wait
- {{ .Values.preflight.waitSeconds | quote }}
{{- end }}
{{- else }}
- podtune
- launch
- --shutdown-timeout
- {{ .Values.runPolicy.shutdownTimeoutSeconds | quote }}
- --max-retries
- {{ .Values.runPolicy.backoffLimit | quote }}
{{- if include "podtune.prepare" . }}
{{- if eq .Values.api "trainjob" }}
{{- /* An installed runtime takes no init container, so the launcher prepares. */}}
- --prepare
- /etc/podtune/config.yaml
{{- else }}
- --verdict
- /tmp/prepare.json
{{- end }}
{{- end }}
{{- if .Values.preflight.enabled }}
- --preflight
- /etc/podtune/config.yaml
- --wait
- {{ .Values.preflight.waitSeconds | quote }}
{{- end }}
- --
- -m
- training.training
- --config
- /etc/podtune/config.yaml
{{- with .Values.distributed.strategy }}
- --strategy
- {{ . | quote }}
{{- end }}
{{- end }}
{{- include "podtune.args" . }}
{{- end }}

{{- define "podtune.args" -}}
{{- range .Values.args }}
{{- /* toJson, because a plain number of a million would become 1e+06. */}}
- {{ ternary . (toJson .) (kindIs "string" .) | quote }}
{{- end }}
{{- end }}

{{/* What both the prepare step and training read. Nothing here is a name that the operator sets. */}}
{{- define "podtune.commonEnv" -}}
- name: PODTUNE_JOB_NAME
  value: {{ include "podtune.name" . }}
- name: PODTUNE_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: PODTUNE_IMAGE
  value: {{ include "podtune.image" . | quote }}
- name: RUN_NAME
  value: {{ include "podtune.name" . }}
- name: OUTPUT_DIR
  value: {{ include "podtune.outputDir" . | quote }}
- name: HF_HOME
  value: {{ printf "%s/huggingface" .Values.persistence.models.mountPath | quote }}
- name: HOME
  value: /tmp
{{- end }}

{{- define "podtune.prepareEnv" -}}
- name: PREPARE_BUILD
  value: {{ .Values.prepare.build | quote }}
- name: PREPARE_TIMEOUT_S
  value: {{ .Values.prepare.timeoutSeconds | quote }}
{{- with .Values.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.hfToken.key }}
{{- end }}
{{- end }}

{{- define "podtune.env" -}}
{{ include "podtune.commonEnv" . }}
{{- if include "podtune.prepare" . }}
{{- if eq .Values.api "trainjob" }}
{{ include "podtune.prepareEnv" . }}
- name: PREPARE_OFFLINE
  value: {{ ternary "0" "1" .Values.prepare.download | quote }}
{{- end }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- with get (.Values.resources.limits | default dict) "nvidia.com/gpu" }}
# What the preflight holds the node to.
- name: PODTUNE_GPUS_PER_POD
  value: {{ toString . | quote }}
{{- end }}
{{- with .Values.resources.limits }}
{{- with .cpu }}
- name: OMP_NUM_THREADS
  value: {{ max 1 (div (include "podtune.wholeCpus" . | int) (int $.Values.distributed.nprocPerNode)) | quote }}
{{- end }}
{{- end }}
{{- if include "podtune.elastic" . }}
# torchrun hangs after a restart when its store is shared with the training processes: their keys of the last round stay.
- name: TORCH_DISABLE_SHARE_RDZV_TCP_STORE
  value: "1"
{{- end }}
{{- range $name, $value := merge (dict) .Values.nccl.env (include "podtune.ncclPreset" . | fromYaml) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* NCCL by the kind of network between the nodes. */}}
{{- define "podtune.ncclPreset" -}}
{{- if eq .Values.nccl.preset "ethernet" }}
# The pod's own interface: with several, NCCL and gloo may choose one that the peers cannot reach.
NCCL_SOCKET_IFNAME: eth0
GLOO_SOCKET_IFNAME: eth0
# No InfiniBand: do not look for it.
NCCL_IB_DISABLE: "1"
# One TCP stream rarely fills a fast link: four threads with four sockets each.
NCCL_SOCKET_NTHREADS: "4"
NCCL_NSOCKS_PERTHREAD: "4"
NCCL_DEBUG: WARN
{{- else if eq .Values.nccl.preset "rdma" }}
# The rendezvous of NCCL itself goes over the pod's interface, the data over the adapters.
NCCL_SOCKET_IFNAME: eth0
GLOO_SOCKET_IFNAME: eth0
# Mellanox/NVIDIA adapters by prefix, whatever their count.
NCCL_IB_HCA: mlx5
# GPU memory straight to the adapter as long as both hang on the same CPU.
NCCL_NET_GDR_LEVEL: PHB
# A link that retrains must not end the job: 4.096 us * 2^22 is about 17 s a try.
NCCL_IB_TIMEOUT: "22"
NCCL_IB_RETRY_CNT: "13"
NCCL_DEBUG: WARN
{{- end }}
{{- end }}

{{- define "podtune.volumeMounts" -}}
{{- range splitList " " (include "podtune.jobVolumes" .) }}
- name: {{ . }}
  mountPath: {{ (index $.Values.persistence .).mountPath }}
{{- end }}
{{- if include "podtune.configFile" . }}
- name: config
  mountPath: /etc/podtune
  readOnly: true
{{- end }}
- name: shm
  mountPath: /dev/shm
- name: tmp
  mountPath: /tmp
{{- end }}

{{- define "podtune.volumes" -}}
{{- range splitList " " (include "podtune.jobVolumes" .) }}
- name: {{ . }}
  persistentVolumeClaim:
    claimName: {{ include "podtune.claimName" (dict "root" $ "key" .) }}
{{- end }}
{{- if include "podtune.configFile" . }}
- name: config
  configMap:
    name: {{ include "podtune.name" . }}
{{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.sizeLimit }}
- name: tmp
  emptyDir: {}
{{- end }}

{{/* The limits, and requests that give every extended resource (nvidia.com/gpu) what its limit says. */}}
{{- define "podtune.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- $requests := $resources.requests | default dict -}}
{{- range $name, $quantity := ($resources.limits | default dict) }}
{{- if contains "/" $name }}{{ $_ := set $requests $name $quantity }}{{ end }}
{{- end }}
{{- $_ := set $resources "requests" $requests -}}
{{ toYaml $resources }}
{{- end }}

{{/* Labels and annotations of every pod of the job. */}}
{{- define "podtune.podMetadata" -}}
labels:
  {{- include "podtune.labels" . | nindent 2 }}
  app.kubernetes.io/component: training
  # An Istio sidecar never ends, and neither would the job.
  sidecar.istio.io/inject: "false"
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  sidecar.istio.io/inject: "false"
  {{- if include "podtune.configFile" . }}
  podtune.io/config-sha256: {{ ternary .Values.config .Values.benchmark.sweep (eq .Values.mode "sft") | sha256sum }}
  {{- end }}
  {{- with .Values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* How a pod is placed and what it may do; the same for training, test and the Aim page, but for where they run. */}}
{{- define "podtune.podSecurity" -}}
serviceAccountName: {{ include "podtune.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "podtune.placement" -}}
{{- /* null takes a label back that a profile asks for */}}
{{- $labels := dict }}
{{- range $label, $value := .Values.nodeSelector }}
{{- if $value }}{{ $_ := set $labels $label $value }}{{ end }}
{{- end }}
{{- with $labels }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if .Values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- end }}

{{/* The one pod template: Master, Workers and the test pod. */}}
{{- define "podtune.podTemplate" -}}
metadata:
  {{- include "podtune.podMetadata" . | nindent 2 }}
spec:
  {{- include "podtune.podSecurity" . | nindent 2 }}
  {{- with include "podtune.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ .Values.runPolicy.terminationGracePeriodSeconds }}
  {{- if include "podtune.prepare" . }}
  initContainers:
    - name: prepare
      image: {{ include "podtune.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      # The operator makes a pod whose init container failed again without end: it sees the exit code of the training
      # container alone. So a failure is left for that one, which ends with it.
      command:
        - podtune
        - prepare
        - --config
        - /etc/podtune/config.yaml
        - --verdict
        - /tmp/prepare.json
        {{- with include "podtune.args" . | trim }}
        - --
        {{- . | nindent 8 }}
        {{- end }}
      env:
        {{- include "podtune.commonEnv" . | nindent 8 }}
        {{- include "podtune.prepareEnv" . | nindent 8 }}
        - name: HF_HUB_OFFLINE
          value: {{ ternary "0" "1" .Values.prepare.download | quote }}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      resources:
        {{- toYaml .Values.prepare.resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        {{- include "podtune.volumeMounts" . | trim | nindent 8 }}
  {{- end }}
  containers:
    # The operator looks for a container of this name.
    - name: pytorch
      image: {{ include "podtune.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command:
        {{- include "podtune.command" . | trim | nindent 8 }}
      env:
        {{- include "podtune.env" . | trim | nindent 8 }}
      {{- with .Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        # The name by which the operator finds the port of the rendezvous.
        - name: pytorchjob-port
          containerPort: {{ .Values.port }}
      resources:
        {{- include "podtune.resources" . | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        {{- include "podtune.volumeMounts" . | trim | nindent 8 }}
  volumes:
    {{- include "podtune.volumes" . | trim | nindent 4 }}
{{- end }}
