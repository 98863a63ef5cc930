{{/* The checks of networks that a JSON schema cannot express. The roles refuse the same values, but
Helm has then installed pods that do not start. */}}

{{/* Fail for the first text in {path, value} that has the form of a network and is none. */}}
{{- define "fairlead.checkNetworks" -}}
{{- if kindIs "map" .value }}
{{- range $name, $each := .value }}
{{- include "fairlead.checkNetworks" (dict "path" (printf "%s.%s" $.path $name) "value" $each) }}
{{- end }}
{{- else if kindIs "slice" .value }}
{{- range $at, $each := .value }}
{{- include "fairlead.checkNetworks" (dict "path" (printf "%s[%d]" $.path $at) "value" $each) }}
{{- end }}
{{- else if kindIs "string" .value }}
{{- if regexMatch "^[0-9a-fA-F]*[.:][0-9a-fA-F.:]*/[0-9]+$" .value }}
{{- include "fairlead.checkNetwork" . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "fairlead.checkNetwork" -}}
{{- $parts := splitList "/" .value }}
{{- $address := first $parts }}
{{- $length := last $parts | int }}
{{- $bits := 8 }}
{{- $groups := list }}
{{- if regexMatch "[.].*:|:.*[.]" $address }}
{{- fail (printf "%s is %s, an IPv4-mapped IPv6 address: write it as IPv4" .path .value) }}
{{- else if contains ":" $address }}
{{- $bits = 16 }}
{{- $halves := splitList "::" $address }}
{{- $left := compact (splitList ":" (first $halves)) }}
{{- $right := compact (splitList ":" (join "" (rest $halves))) }}
{{- range $left }}{{ $groups = append $groups (int64 (printf "0x%s" .)) }}{{ end }}
{{- if eq (len $halves) 2 }}
{{- range until (sub 8 (add (len $left) (len $right)) | max 0 | int) }}{{ $groups = append $groups 0 }}{{ end }}
{{- end }}
{{- range $right }}{{ $groups = append $groups (int64 (printf "0x%s" .)) }}{{ end }}
{{- else if regexMatch "^(([1-9]?[0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])(\\.|$)){4}" $address }}
{{- range splitList "." $address }}{{ $groups = append $groups (int64 .) }}{{ end }}
{{- end }}
{{- $whole := mul $bits (len $groups) | int }}
{{- if or (ne $whole (ternary 32 128 (eq $bits 8))) (regexMatch "[0-9a-fA-F]{5}" $address) }}
{{- fail (printf "%s is %s, which is no network: write one such as 192.0.2.0/24 or 2001:db8::/64" .path .value) }}
{{- else if gt $length $whole }}
{{- fail (printf "%s is %s: a prefix length is at most %d" .path .value $whole) }}
{{- end }}
{{- range $at, $group := $groups }}
{{- $size := 1 }}
{{- range until (min $bits (max 0 (sub (mul (add1 $at) $bits) $length)) | int) }}{{ $size = mul $size 2 }}{{ end }}
{{- if mod $group $size }}
{{- fail (printf "%s is %s, which has host bits set: only its first %d bits may be other than 0" $.path $.value $length) }}
{{- end }}
{{- end }}
{{- end }}
