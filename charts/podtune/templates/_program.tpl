{{/* What a container of the job runs: command, arguments, environment. */}}

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
- podtune.training
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
  value: {{ include "podtune.name" . | quote }}
- name: PODTUNE_POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: PODTUNE_IMAGE
  value: {{ include "podtune.image" . | quote }}
- name: RUN_NAME
  value: {{ include "podtune.name" . | quote }}
- name: OUTPUT_DIR
  value: {{ include "podtune.outputDir" . | quote }}
- name: HF_HOME
  value: {{ printf "%s/huggingface" .Values.persistence.models.mountPath | quote }}
- name: HOME
  value: /tmp
# A Python file in a working directory, which others may write, is never imported.
- name: PYTHONSAFEPATH
  value: "1"
{{- end }}

{{- define "podtune.prepareEnv" -}}
- name: PREPARE_BUILD
  value: {{ .Values.prepare.build | quote }}
- name: PREPARE_TIMEOUT_S
  value: {{ .Values.prepare.timeoutSeconds | quote }}
{{- include "podtune.hubToken" . }}
{{- end }}

{{- define "podtune.hubToken" }}
{{- with .Values.hfToken.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ . | quote }}
      key: {{ $.Values.hfToken.key | quote }}
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
  value: {{ ternary "0" "1" (eq (include "podtune.streams" .) "true") | quote }}
{{- if and (include "podtune.streams" .) (ne .Values.api "trainjob") }}
{{- include "podtune.hubToken" . }}
{{- end }}
{{- end }}
{{- $limits := .Values.resources.limits | default dict }}
{{- with or (get $limits "nvidia.com/gpu") (get $limits "amd.com/gpu") }}
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
- name: {{ $name | quote }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}
