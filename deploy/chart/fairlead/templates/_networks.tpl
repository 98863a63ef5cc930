{{/* The checks of networks and addresses that a JSON schema cannot express. The roles refuse the same
values, but Helm has then installed pods that do not start. */}}

{{/* Fail for the first text in the lists of {path, value} that must be a network, a range of addresses
or an address, and is none. */}}
{{- define "fairlead.checkNetworks" -}}
{{- if kindIs "map" .value }}
{{- range $name, $each := .value }}
{{- include "fairlead.checkNetworks" (dict "path" (printf "%s.%s" $.path $name) "value" $each) }}
{{- end }}
{{- else if kindIs "slice" .value }}
{{- range $at, $each := .value }}
{{- $item := dict "path" (printf "%s[%d]" $.path $at) "value" $each }}
{{- if kindIs "string" $each }}
{{- with include "fairlead.networkProblem" $item }}
{{- fail (printf "%s is %s, %s" $item.path $each .) }}
{{- end }}
{{- else }}
{{- include "fairlead.checkNetworks" $item }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* What is wrong with one text in a list of the configuration. Empty: nothing. Each text with a slash
must be a network, except for the values of labels. */}}
{{- define "fairlead.networkProblem" -}}
{{- $isRange := regexMatch "^(pool|config[.]pools\\[[0-9]+\\][.]addresses)\\[" .path }}
{{- if contains ".values[" .path }}
{{- else if contains "/" .value }}
{{- $parts := splitn "/" 2 .value }}
{{- $bits := include "fairlead.bits" $parts._0 }}
{{- $length := int $parts._1 }}
{{- if not $bits -}}
which is no network: write one such as 192.0.2.0/24 or 2001:db8::/64
{{- else if regexMatch "^0{80}1{16}" $bits -}}
an IPv4-mapped IPv6 address: write it as IPv4
{{- else if or (not (regexMatch "^(0|[1-9][0-9]{0,2})$" $parts._1)) (gt $length (len $bits)) -}}
whose prefix length must be a number from 0 to {{ len $bits }} without a leading 0
{{- else if not (regexMatch (printf "^[01]{%d}0*$" $length) $bits) -}}
which has host bits set: only its first {{ $length }} bits may be other than 0
{{- else if $isRange }}
{{- $ones := repeat (sub (len $bits) $length | int) "1" }}
{{- include "fairlead.rangeProblem" (list $bits (print (substr 0 $length $bits) $ones)) }}
{{- end }}
{{- else if $isRange }}
{{- $ends := regexSplit "\\s*-\\s*" (regexReplaceAll "^\\s+|\\s+$" .value "") 2 }}
{{- $first := include "fairlead.bits" (first $ends) }}
{{- include "fairlead.rangeProblem" (list $first (include "fairlead.bits" (last $ends))) }}
{{- else if regexMatch "[.](interfaces|interfacesByNode[.].*)\\[" .path }}
{{- if include "fairlead.bits" (regexReplaceAll "(:.*)%.+" .value "${1}") -}}
an address: to choose the interface that has it, write it as a CIDR
{{- end }}
{{- else if hasPrefix "config.gateway.apiServer.addresses[" .path }}
{{- $bits := include "fairlead.bits" .value }}
{{- include "fairlead.rangeProblem" (list $bits $bits) }}
{{- end }}
{{- end }}

{{/* What is wrong with the range from the first to the last of two addresses, which are bits. */}}
{{- define "fairlead.rangeProblem" -}}
{{- $first := first . }}
{{- $last := last . }}
{{- $ipv4 := "0{32}|01111111[01]{24}|1110[01]{28}|1010100111111110[01]{16}" }}
{{- $ipv6 := "0{127}[01]|1{8}[01]{120}|1111111010[01]{118}" }}
{{- if or (not $first) (not $last) -}}
which is no range of addresses: write an address, a network, or the first and the last address
{{- else if or (ne (len $first) (len $last)) (gt $first $last) -}}
which is no range from a lower to a higher address of one family
{{- else if or (regexMatch "^0{80}1{16}" $first) (regexMatch "^0{80}1{16}" $last) -}}
an IPv4-mapped IPv6 address: write it as IPv4
{{- else if regexMatch (printf "\\b(%s|%s)\\b" $ipv4 $ipv6) (print $first " " $last) -}}
whose addresses are not reachable from other hosts
{{- end }}
{{- end }}

{{/* The 32 or 128 bits of an address, as digits. Empty: the text is no address. */}}
{{- define "fairlead.bits" -}}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])" }}
{{- $ipv4 := printf "%s([.]%s){3}$" $octet $octet }}
{{- $group := "[0-9a-fA-F]{1,4}" }}
{{- $groups := printf "%s(:%s)*" $group $group }}
{{- if regexMatch (print "^" $ipv4) . }}
{{- range splitList "." . }}{{ int . | printf "%08b" }}{{ end }}
{{- else }}
{{- $text := . }}
{{- with regexFind (print ":" $ipv4) . }}
{{- $octets := splitList "." (trimPrefix ":" .) }}
{{- $text = trimSuffix . $ | printf "%[5]s:%02[1]x%02[2]x:%02[3]x%02[4]x" (index $octets 0 | int) (index $octets 1 | int) (index $octets 2 | int) (index $octets 3 | int) }}
{{- end }}
{{- $halves := splitList "::" $text }}
{{- $left := regexFindAll $group (first $halves) -1 }}
{{- $right := regexFindAll $group (rest $halves | join "") -1 }}
{{- $missing := sub 8 (len $left | add (len $right)) | int }}
{{- $full := regexMatch (printf "^%s$" $groups) $text | and (eq $missing 0) }}
{{- if or $full (regexMatch (printf "^(%s)?::(%s)?$" $groups $groups) $text | and (gt $missing 0)) }}
{{- range $left }}{{ print "0x" . | int64 | printf "%016b" }}{{ end }}
{{- repeat (mul 16 $missing | int) "0" }}
{{- range $right }}{{ print "0x" . | int64 | printf "%016b" }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
