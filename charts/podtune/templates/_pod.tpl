{{/* The pod around it: volumes, resources, security, placement. */}}

{{- define "podtune.volumeMounts" -}}
{{- range splitList " " (include "podtune.jobVolumes" .) }}
- name: {{ . }}
  mountPath: {{ (index $.Values.persistence .).mountPath | quote }}
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
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "podtune.claimSpec" -}}
accessModes:
  {{- toYaml .accessModes | nindent 2 }}
{{- with .storageClass }}
storageClassName: {{ . | quote }}
{{- end }}
resources:
  requests:
    storage: {{ .size | quote }}
{{- end }}

{{- define "podtune.volumes" -}}
{{- range splitList " " (include "podtune.jobVolumes" .) }}
- name: {{ . }}
  {{- $volume := index $.Values.persistence . }}
  {{- if $volume.perPod }}
  ephemeral:
    volumeClaimTemplate:
      metadata:
        labels:
          {{- include "podtune.labels" $ | nindent 10 }}
      spec:
        {{- include "podtune.claimSpec" $volume | nindent 8 }}
  {{- else }}
  persistentVolumeClaim:
    claimName: {{ include "podtune.claimName" (dict "root" $ "key" .) | quote }}
  {{- end }}
{{- end }}
{{- if include "podtune.configFile" . }}
- name: config
  configMap:
    name: {{ include "podtune.name" . | quote }}
{{- end }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.shm.sizeLimit | quote }}
- name: tmp
  emptyDir: {}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The limits, requests that give every extended resource (nvidia.com/gpu) what its limit says, and the pod's claims. */}}
{{- define "podtune.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- $requests := $resources.requests | default dict -}}
{{- range $name, $quantity := ($resources.limits | default dict) }}
{{- if contains "/" $name }}{{ $_ := set $requests $name $quantity }}{{ end }}
{{- end }}
{{- $_ := set $resources "requests" $requests -}}
{{- range .Values.resourceClaims }}
{{- $_ := set $resources "claims" (append ($resources.claims | default list) (dict "name" .name)) -}}
{{- end -}}
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
serviceAccountName: {{ include "podtune.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- include "podtune.pullSecrets" . }}
{{- end }}

{{- define "podtune.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Which nodes; all that a TrainJob can say of it, too. */}}
{{- define "podtune.nodes" -}}
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
{{- end }}

{{- define "podtune.placement" -}}
{{- include "podtune.nodes" . }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.schedulerName }}
schedulerName: {{ . | quote }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.resourceClaims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
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
  {{- if or (include "podtune.prepare" .) .Values.sidecars .Values.extraInitContainers }}
  initContainers:
    {{- /* Before prepare, which may need what they do. A sidecar that is an init container ends with the pod, not after it. */}}
    {{- range .Values.sidecars }}
    - {{- toYaml (set (deepCopy .) "restartPolicy" "Always") | nindent 6 }}
    {{- end }}
    {{- with .Values.extraInitContainers }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- if include "podtune.prepare" . }}
    - name: prepare
      image: {{ include "podtune.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy | quote }}
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
      # Never a volume: what others write there must not be found by a program that looks in its working directory.
      workingDir: /tmp
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
      imagePullPolicy: {{ .Values.image.pullPolicy | quote }}
      command:
        {{- include "podtune.command" . | trim | nindent 8 }}
      workingDir: /tmp
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
