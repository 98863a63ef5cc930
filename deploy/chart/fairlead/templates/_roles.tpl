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
{{- if include "fairlead.birdRole" . }}
{{- $_ := set $own "announce" (dict "bgp" (dict "startDaemon" false)) }}
{{- end }}
{{- if include "fairlead.generatesPeersSecret" . }}
{{- $at := "/etc/fairlead-peers" }}
{{- $files := dict "certificate" (print $at "/tls.crt") "key" (print $at "/tls.key") "ca" (print $at "/ca.crt") }}
{{- $_ := set $own "gateway" (dict "peerTLS" $files) }}
{{- end }}
{{- mergeOverwrite $own (deepCopy .root.Values.config) | toYaml }}
{{- end }}

{{/* Not empty if the chart generates the certificate by which gateways recognize each other. */}}
{{- define "fairlead.generatesPeersSecret" -}}
{{- $gateway := .root.Values.gateway }}
{{- $config := default dict .root.Values.config.gateway }}
{{- if and $gateway.enabled $gateway.generatePeersSecret (not $gateway.peersSecret) $config.peers (not $config.peerTLS) }}yes{{ end }}
{{- end }}

{{/* The Secret with the certificate of the gateways; empty: none. */}}
{{- define "fairlead.peersSecret" -}}
{{- if include "fairlead.generatesPeersSecret" . }}fairlead-gateway-peers{{ else }}{{ .root.Values.gateway.peersSecret }}{{ end }}
{{- end }}

{{/* Not empty if hosts announce addresses. */}}
{{- define "fairlead.announces" -}}
{{- if kindIs "map" .root.Values.config.announce }}yes{{ end }}
{{- end }}

{{/* Not empty if nodes announce the addresses of class fairlead.io/announce. */}}
{{- define "fairlead.nodeAnnounces" -}}
{{- if and (include "fairlead.announces" .) (dig "node" "announce" false .root.Values.config) }}yes{{ end }}
{{- end }}

{{/* The role beside which BIRD runs; empty: none. */}}
{{- define "fairlead.birdRole" -}}
{{- if include "fairlead.announces" . }}
{{- $announce := .root.Values.config.announce }}
{{- $used := or (eq (dig "method" "none" $announce) "bgp") (hasKey $announce "bgp") }}
{{- if and $used (ne (dig "bgp" "speaker" "bird" $announce) "routes") }}
{{- if .root.Values.gateway.enabled }}gateway{{ else if and .root.Values.node.enabled (include "fairlead.nodeAnnounces" .) }}node{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The directory that a role and its BIRD share. */}}
{{- define "fairlead.birdDirectory" -}}
{{- dig "announce" "bgp" "directory" "/run/fairlead/bird" .root.Values.config }}
{{- end }}

{{/* The file that a running BIRD touches every few seconds. */}}
{{- define "fairlead.birdAlive" -}}
{{ include "fairlead.birdDirectory" . }}/alive
{{- end }}

{{/* What the containers of BIRD may do. */}}
{{- define "fairlead.birdSecurity" -}}
runAsUser: 0
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
{{- end }}

{{/* The container that runs before the role and BIRD. When BIRD has not run for longer than
neighbors keep its routes by default (gracefulRestartTimeS and longLivedStaleTimeS, 20 s and 60 s),
its files may be weeks old: they are removed, so that nothing is announced before the role has
written new ones. A younger BIRD starts at once with its files. */}}
{{- define "fairlead.birdFiles" -}}
{{- $directory := include "fairlead.birdDirectory" . -}}
{{- $alive := include "fairlead.birdAlive" . -}}
- name: bird-files
  {{- include "fairlead.image" . | nindent 2 }}
  command:
    - /bin/sh
    - -euc
    - >-
      find {{ $alive }} -newermt "80 seconds ago" 2>/dev/null | grep -q . ||
      rm -f {{ $directory }}/bird.conf {{ $directory }}/routes.conf {{ $alive }}
  securityContext:
    {{- include "fairlead.birdSecurity" . | nindent 4 }}
    capabilities: {drop: [ALL]}
  resources: {{- toYaml .root.Values.bird.resources | nindent 4 }}
  volumeMounts:
    - {name: bird, mountPath: {{ $directory }}}
{{- end }}

{{/* The container of BIRD. It waits until the role has written the configuration. When the container
is stopped, neighbors keep the routes until the next container has started (RFC 4724). With
`withdrawAtStop`, BIRD instead runs on until the role, which the kubelet stops at the same time, has
withdrawn all Services: then the file of routes names none any more. If the role does not, BIRD is
stopped after 20 s and closes its sessions, which withdraws the routes too. */}}
{{- define "fairlead.bird" -}}
{{- $directory := include "fairlead.birdDirectory" . -}}
{{- range dig "bgp" "peers" list .root.Values.config.announce }}
{{- if .passwordFile }}
{{- fail (printf "passwordFile of peer %s in config.announce.bgp.peers cannot be read in a pod: set passwordSecret" .name) }}
{{- end }}
{{- end -}}
- name: bird
  {{- include "fairlead.image" . | nindent 2 }}
  # The loop ends with its parent, this shell and then BIRD. Kubernetes replaces a doubled $ itself.
  command:
    - /bin/sh
    - -euc
    - >-
      trap "exit 0" TERM;
      until [ -e {{ $directory }}/bird.conf ]; do sleep 0.2; done;
      sh -c "while kill -0 \$PPID; do touch {{ include "fairlead.birdAlive" . }}; sleep 5; done" >/dev/null 2>&1 &
      exec bird -f -R -c {{ $directory }}/bird.conf -s {{ $directory }}/bird.ctl
  lifecycle:
    preStop:
      {{- if dig "withdrawAtStop" false .root.Values.config.announce }}
      exec:
        command:
          - /bin/sh
          - -uc
          - >-
            timeout 20 sh -c
            'while grep -q "^# service: " {{ $directory }}/routes.conf; do sleep 0.2; done' || true
      {{- else }}
      exec: {command: [birdc, -s, {{ $directory }}/bird.ctl, graceful, restart]}
      {{- end }}
  securityContext:
    {{- include "fairlead.birdSecurity" . | nindent 4 }}
    # NET_BIND_SERVICE for port 179, NET_RAW for BFD.
    capabilities: {drop: [ALL], add: [NET_BIND_SERVICE, NET_RAW]}
  resources: {{- toYaml .root.Values.bird.resources | nindent 4 }}
  volumeMounts:
    - {name: bird, mountPath: {{ $directory }}}
{{- end }}

{{/* The volume of this directory: it outlives the pod, but not a boot of the host, after which
nothing may be announced before the role is ready. */}}
{{- define "fairlead.birdVolume" -}}
- {name: bird, hostPath: {path: /run/fairlead-bird, type: DirectoryOrCreate}}
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
