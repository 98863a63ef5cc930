{{/* The templates that the roles share. Each takes {root, role}. */}}

{{- define "fairlead.selector" -}}
app.kubernetes.io/name: fairlead
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "fairlead.labels" -}}
{{ include "fairlead.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end }}

{{- define "fairlead.metadata" -}}
name: fairlead-{{ .role }}
namespace: {{ .root.Release.Namespace }}
labels: {{- include "fairlead.labels" . | nindent 2 }}
{{- end }}

{{- define "fairlead.configuration" -}}
{{ $own := dict "controller" (dict "leaseNamespace" .root.Release.Namespace) }}
{{- $config := deepCopy .root.Values.config }}
{{- with .root.Values.pool }}
{{- $_ := set $config "pools" (prepend (default list $config.pools) (dict "name" "main" "addresses" .)) }}
{{- end }}
{{- if eq .root.Values.announce "l2" }}
{{- $own = mergeOverwrite $own (dict "announce" (dict "l2" dict)) }}
{{- if not (hasKey $config "defaultClass") }}{{ $_ := set $config "defaultClass" "fairlead.io/direct" }}{{ end }}
{{- if not (include "fairlead.interfaces" .) }}
{{- $config = mergeOverwrite $config (dict "gateway" (dict "interfaces" (list "default-route"))) }}
{{- end }}
{{- /* Every node has these tables: those of a small cluster. */}}
{{- $sizes := dict "tableMemoryMiB" 8 "connectionEntries" 32768 "datagramEntries" 16384 }}
{{- $own = mergeOverwrite $own (dict "gateway" (merge $sizes (dict "peers" "auto"))) }}
{{- end }}
{{- mergeOverwrite $own $config | toYaml }}
{{- end }}

{{/* Not empty if gateways announce addresses. */}}
{{- define "fairlead.announces" -}}
{{- $announce := (include "fairlead.configuration" . | fromYaml).announce }}
{{- if and $announce (kindIs "map" $announce.l2) }}yes{{ end }}
{{- end }}

{{/* Not empty if gateways observe each other: to choose the owners of addresses, or to exchange flow
entries. */}}
{{- define "fairlead.observes" -}}
{{- $gateway := default dict (include "fairlead.configuration" . | fromYaml).gateway }}
{{- if or (include "fairlead.announces" .) (eq (toString $gateway.peers) "auto") }}yes{{ end }}
{{- end }}

{{/* Not empty if the values name interfaces for gateways. */}}
{{- define "fairlead.interfaces" -}}
{{- $config := .root.Values.config }}
{{- if or (dig "gateway" "interfaces" list $config) (dig "gateway" "interfacesByNode" dict $config) }}yes{{ end }}
{{- end }}

{{/* Not empty if a role runs in the cluster. Where gateways announce addresses, they do. */}}
{{- define "fairlead.enabled" -}}
{{- if or (index .root.Values .role).enabled (and (eq .role "gateway") (eq .root.Values.announce "l2")) }}yes{{ end }}
{{- end }}

{{/* The labels of the nodes on which a role runs. Helm merges maps, so that a default label in the
values could not be removed. */}}
{{- define "fairlead.nodeSelector" -}}
{{- $given := (index .root.Values .role).nodeSelector }}
{{- if $given }}
{{- toYaml $given }}
{{- else if and (eq .role "gateway") (ne .root.Values.announce "l2") }}
{{- toYaml (dict "fairlead.io/gateway" "") }}
{{- end }}
{{- end }}

{{/* The start of every pod template. The annotation restarts pods when the configuration changes. */}}
{{- define "fairlead.pod" -}}
metadata:
  labels: {{- include "fairlead.labels" . | nindent 4 }}
  annotations:
    fairlead.io/configuration: {{ include "fairlead.configuration" . | sha256sum | trunc 16 }}
    kubectl.kubernetes.io/default-container: fairlead
spec:
  serviceAccountName: fairlead-{{ .role }}
  {{- with index .root.Values .role }}
  priorityClassName: {{ .priorityClassName }}
  {{- with include "fairlead.nodeSelector" $ }}
  nodeSelector: {{- . | nindent 4 }}
  {{- end }}
  {{- with .tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets: {{- range . }}
    - name: {{ . }}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Not empty if Prometheus, which runs in a pod, can reach the metrics of a role. Gateways and
nodes are in the host's network, so other hosts can reach them only if they listen on `*`. */}}
{{- define "fairlead.scraped" -}}
{{- with index .root.Values .role }}
{{- if and (include "fairlead.enabled" $) (or (eq $.role "controller") (eq (default "*" .listen) "*")) }}yes{{ end }}
{{- end }}
{{- end }}

{{- define "fairlead.image" -}}
image: {{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{/* Probes and resources. The kubelet probes pods in the host's network on loopback. */}}
{{- define "fairlead.probes" -}}
ports:
  - {name: web, containerPort: {{ (index .root.Values .role).port }}}
livenessProbe:
  httpGet: {path: /healthz, port: web{{ if .host }}, host: {{ .host }}{{ end }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: web{{ if .host }}, host: {{ .host }}{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 5
resources: {{- include "fairlead.resources" . | nindent 2 }}
{{- end }}

{{/* Gateways on all nodes have the tables of a small cluster, so they need less memory. */}}
{{- define "fairlead.resources" -}}
{{- $resources := deepCopy (index .root.Values .role).resources }}
{{- if eq .role "gateway" }}
{{- $small := eq .root.Values.announce "l2" }}
{{- $requests := dict "cpu" "50m" "memory" (ternary "160Mi" "640Mi" $small) }}
{{- $limits := dict "memory" (ternary "1Gi" "2Gi" $small) }}
{{- $resources = mergeOverwrite (dict "requests" $requests "limits" $limits) $resources }}
{{- end }}
{{- toYaml $resources }}
{{- end }}
