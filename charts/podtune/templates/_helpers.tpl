{{/* The run's name: the release's, unless overridden. Everything that the chart makes starts with it. */}}
{{- define "podtune.name" -}}
{{- .Values.fullnameOverride | default .Release.Name -}}
{{- end }}

{{- define "podtune.selectorLabels" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default .Chart.Name | quote }}
app.kubernetes.io/instance: {{ include "podtune.name" . | quote }}
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

{{- define "podtune.jobLabels" -}}
{{ include "podtune.labels" . }}
{{- with .Values.kueue.queueName }}
kueue.x-k8s.io/queue-name: {{ . | quote }}
{{- end }}
{{- with .Values.kueue.priorityClass }}
kueue.x-k8s.io/priority-class: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The label by which the pods of a job are found; its value is the job's name. */}}
{{- define "podtune.jobPodLabel" -}}
{{- get (dict "pytorchjob" "training.kubeflow.org/job-name" "trainjob" "jobset.sigs.k8s.io/jobset-name" "job" "batch.kubernetes.io/job-name") .Values.api -}}
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
{{/* Whether rows come from the hub while they are trained. */}}
{{- define "podtune.streams" -}}
{{- $config := fromYaml .Values.config -}}
{{- if and (eq .Values.mode "sft") .Values.prepare.download (or $config.dataset_streaming $config.streaming) }}true{{ end -}}
{{- end }}

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
