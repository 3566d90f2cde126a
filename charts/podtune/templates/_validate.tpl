{{/*
What the schema cannot say in a sentence. Each refusal is "PATH: WHAT | fix: WHAT TO DO", which podtune takes apart.
*/}}
{{- define "podtune.validate" -}}
{{- $name := include "podtune.name" . }}
{{- $nodes := int .Values.distributed.nodes }}
{{- $elastic := .Values.distributed.elastic }}
{{- $longest := ternary 48 50 (eq .Values.api "trainjob") }}
{{- if gt (len $name) $longest }}
{{- fail (printf "release name: '%s' has %d characters, pods need it to have at most %d | fix: install under a shorter name, or set fullnameOverride" $name (len $name) $longest) }}
{{- end }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "release name: '%s' cannot name a Service (lower-case letters, digits and dashes, a letter first) | fix: choose such a name, or set fullnameOverride" $name) }}
{{- end }}
{{- if eq .Values.mode "sft" }}
{{- $config := fromYaml .Values.config }}
{{- if hasKey $config "Error" }}
{{- fail (printf "config: is not a YAML mapping: %s | fix: give it as a text block (config: |) in the form that trl's sft takes" ($config.Error | replace "\n" " ")) }}
{{- end }}
{{- include "podtune.noSecret" (dict "where" "config" "name" "" "value" $config) }}
{{- $output := .Values.persistence.output.mountPath }}
{{- with $config.output_dir }}
{{- if not (hasPrefix (printf "%s/" $output) (printf "%s/" .)) }}
{{- fail (printf "config: output_dir %s is not on the output volume (%s), so the model would be lost with the pod | fix: leave output_dir out, the chart sets it" . $output) }}
{{- end }}
{{- end }}
{{- if and $config.strategy .Values.distributed.strategy (ne $config.strategy .Values.distributed.strategy) }}
{{- fail (printf "distributed.strategy: is %s, but config says strategy: %s | fix: say it in one place" .Values.distributed.strategy $config.strategy) }}
{{- end }}
{{- end }}
{{- if include "podtune.elastic" . }}
{{- if not $elastic.minNodes }}
{{- fail "distributed.elastic.minNodes: is not set, but maxNodes is | fix: set both, for example minNodes 2 and maxNodes 4" }}
{{- end }}
{{- if or (gt (int $elastic.minNodes) $nodes) (gt $nodes (int $elastic.maxNodes)) }}
{{- fail (printf "distributed.nodes: %d is not between elastic.minNodes %d and elastic.maxNodes %d | fix: start with a count of pods in that range" $nodes (int $elastic.minNodes) (int $elastic.maxNodes)) }}
{{- end }}
{{- else if $elastic.minNodes }}
{{- fail "distributed.elastic.maxNodes: is not set, but minNodes is | fix: set both, or neither for a job of fixed size" }}
{{- end }}
{{- with (.Values.resources.limits | default dict) }}
{{- range $resource, $quantity := . }}
{{- if and (hasSuffix "/gpu" $resource) (ne (int $quantity) (int $.Values.distributed.nprocPerNode)) }}
{{- fail (printf "distributed.nprocPerNode: is %d, but resources.limits gives a pod %d of %s | fix: make the two equal: one process a GPU" (int $.Values.distributed.nprocPerNode) (int $quantity) $resource) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $resource, $quantity := (.Values.resources.requests | default dict) }}
{{- $limit := get ($.Values.resources.limits | default dict) $resource }}
{{- if and (contains "/" $resource) (ne (toString $quantity) (toString $limit)) }}
{{- fail (printf "resources.requests: asks for %v of %s, but limits says %v | fix: set the limit alone; the request follows it" $quantity $resource ($limit | default "nothing")) }}
{{- end }}
{{- end }}
{{- if lt (int .Values.runPolicy.terminationGracePeriodSeconds) (add (int .Values.runPolicy.shutdownTimeoutSeconds) 30) }}
{{- fail (printf "runPolicy.terminationGracePeriodSeconds: %d s is too short for a shutdownTimeoutSeconds of %d s, so a pod would be killed while it saves | fix: make it at least %d" (int .Values.runPolicy.terminationGracePeriodSeconds) (int .Values.runPolicy.shutdownTimeoutSeconds) (add (int .Values.runPolicy.shutdownTimeoutSeconds) 30)) }}
{{- end }}
{{- range $where := list "podLabels" "commonLabels" }}
{{- range $label, $_ := index $.Values $where }}
{{- if regexMatch "^((training|trainer)\\.kubeflow\\.org/|jobset\\.sigs\\.k8s\\.io/|batch\\.kubernetes\\.io/|app\\.kubernetes\\.io/(name|instance|component|managed-by)$)" $label }}
{{- fail (printf "%s: sets %s, by which operator, Services and NetworkPolicies know whose a pod is | fix: choose a key of your own" $where $label) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $where, $value := dict "config" .Values.config "benchmark.sweep" .Values.benchmark.sweep "nccl.env" .Values.nccl.env "podAnnotations" .Values.podAnnotations }}
{{- include "podtune.noSecret" (dict "where" $where "name" "" "value" $value) }}
{{- end }}
{{- range .Values.env }}
{{- if regexMatch "^(RANK|LOCAL_RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|PET_.*)$" .name }}
{{- fail (printf "env: sets %s, which is the operator's, so pods would not find each other | fix: leave it out" .name) }}
{{- end }}
{{- include "podtune.noSecret" (dict "where" "env" "name" .name "value" .value) }}
{{- end }}
{{- $option := "" }}
{{- range .Values.args }}
{{- $word := toString . }}
{{- $name := $option }}
{{- $value := $word }}
{{- if hasPrefix "--" $word }}
{{- $option = $word | trimPrefix "--" | splitList "=" | first }}
{{- $name = $option }}
{{- $value = $word | trimPrefix (printf "--%s" $option) | trimPrefix "=" }}
{{- end }}
{{- include "podtune.noSecret" (dict "where" "args" "name" $name "value" $value) }}
{{- end }}
{{- if and .Values.rbac.create (not .Values.rbac.subjects) }}
{{- fail "rbac.subjects: is empty, so the Role would be nobody's | fix: name who gets it, for example [{kind: User, name: ada, apiGroup: rbac.authorization.k8s.io}]" }}
{{- end }}
{{- range splitList " " (include "podtune.jobVolumes" .) }}
{{- include "podtune.validateSharing" (dict "root" $ "key" .) }}
{{- end }}
{{- end }}

{{/* One volume in several pods: ReadWriteMany, in the values or, where the cluster can be asked, in the claim itself. */}}
{{- define "podtune.validateSharing" -}}
{{- $root := .root }}
{{- $volume := index $root.Values.persistence .key }}
{{- $pods := printf "%d pods" (int $root.Values.distributed.nodes) }}
{{- $shared := gt (int $root.Values.distributed.nodes) 1 }}
{{- if and (eq .key "output") $root.Values.aim.enabled (not $shared) }}
{{- $shared = true }}
{{- $pods = "the job's pod and the Aim pod" }}
{{- end }}
{{- if $volume.perPod }}
{{- if $volume.existingClaim }}
{{- fail (printf "persistence.%s.perPod: each pod gets a new volume, but existingClaim names %s | fix: set one of the two" .key $volume.existingClaim) }}
{{- end }}
{{- if and (eq .key "output") $root.Values.aim.enabled }}
{{- fail "persistence.output.perPod: the Aim pod reads the job's output volume | fix: perPod: false, or aim.enabled: false" }}
{{- end }}
{{- if and (eq .key "output") (or (ne $root.Values.mode "sft") (not (fromYaml $root.Values.config).publish)) }}
{{- fail "persistence.output.perPod: what is on these volumes goes with the pods, and nothing says where to publish it | fix: mode: sft with publish: URL in config, or perPod: false with a volume that stays" }}
{{- end }}
{{- else if $shared }}
{{- if not $volume.existingClaim }}
{{- if not (has "ReadWriteMany" $volume.accessModes) }}
{{- fail (printf "persistence.%s.accessModes: is [%s], but %s share the volume | fix: set it to [ReadWriteMany] with a storageClass that offers it (NFS, CephFS, EFS, Filestore, Azure Files); without one, perPod: true and publish in config" .key (join ", " $volume.accessModes) $pods) }}
{{- end }}
{{- else }}
{{- with (lookup "v1" "PersistentVolumeClaim" $root.Release.Namespace $volume.existingClaim) }}
{{- if not (has "ReadWriteMany" .spec.accessModes) }}
{{- fail (printf "persistence.%s.existingClaim: the claim %s is [%s], but %s share the volume | fix: use a claim that is ReadWriteMany" $.key $volume.existingClaim (join ", " .spec.accessModes) $pods) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Refuse what looks like a secret: ConfigMaps, jobs and releases are read by many. Goes into maps and lists. */}}
{{- define "podtune.noSecret" -}}
{{- $where := .where }}
{{- $name := .name }}
{{- if kindIs "map" .value }}
{{- range $key, $value := .value }}
{{- include "podtune.noSecret" (dict "where" $where "name" $key "value" $value) }}
{{- end }}
{{- else if kindIs "slice" .value }}
{{- range .value }}
{{- include "podtune.noSecret" (dict "where" $where "name" $name "value" .) }}
{{- end }}
{{- else if kindIs "string" .value }}
{{- $named := and (regexMatch "(?i)(^|[_-])(TOKEN|SECRET|BEARER|CREDENTIALS|PAT|WEBHOOK(_?URL)?|NOTIFY_?URL|CONNECTION_?STRING|(API|ACCESS|PRIVATE)?KEY)$|PASSW(OR)?D$" $name) (not (regexMatch "(?i)^(EOS|BOS|PAD|UNK|SEP|CLS|MASK|STOP|IMAGE)_TOKEN$|(^|_)(PUBLIC|CACHE|SORT|ROUTING|PARTITION|PRIMARY|IMAGE|LABEL|TEXT|CONFIG|STATE)_KEY$" $name)) (not (regexMatch "^(|/.*|\\$\\(.*)$" .value)) }}
{{- $known := regexMatch "\\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\\w{20,}|AKIA[0-9A-Z]{16}|sk-[A-Za-z0-9_-]{20,}|xox[abp]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{20,})" .value }}
{{- $url := regexMatch "://[^/@:\\s]+:[^/@\\s]+@|://\\S*[?&;#](?i:[\\w.-]*(sig|signature|token|secret|password|credential|key|code))=" .value }}
{{- if or $named $known $url }}
{{- fail (printf "%s: holds %s in plain text, which everyone who reads the release sees | fix: refer to a Secret by env.valueFrom.secretKeyRef, or set hfToken.existingSecret" $where (ternary $name "a secret" (ne $name ""))) }}
{{- end }}
{{- end }}
{{- end }}
