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
{{ $lease := dict "controller" (dict "leaseNamespace" .root.Release.Namespace) }}
{{- mergeOverwrite $lease (deepCopy .root.Values.config) | toYaml }}
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
  {{- with .nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
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
{{- if and .enabled (or (eq $.role "controller") (eq (default "*" .listen) "*")) }}yes{{ end }}
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
resources: {{- toYaml (index .root.Values .role).resources | nindent 2 }}
{{- end }}
