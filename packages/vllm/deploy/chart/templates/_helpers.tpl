{{/* The labels of one part, which its Service selects. */}}
{{- define "kvwire.labels" -}}
app.kubernetes.io/name: kvwire
app.kubernetes.io/instance: {{ .release }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* The file of a Secret that a process of uid 1000 reads, and nobody else. */}}
{{- define "kvwire.key" -}}
- name: key
  secret: {secretName: {{ .Values.keySecret }}, defaultMode: 0400}
{{- end }}

{{/* What every container that needs no rights has. */}}
{{- define "kvwire.confined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* --kv-transfer-config of an engine: kvwire between engines, and a store beside it. */}}
{{- define "kvwire.transfer" -}}
{{- $pod := ternary "[$(POD_IP)]" "$(POD_IP)" (eq .Values.family "IPv6") }}
{{- $extra := dict "listen" (printf "%s:7400" $pod) "trust" "psk" "psk_file" "/key/key" }}
{{- if .Values.directory }}
{{- $_ := set $extra "directory" .Values.directory }}
{{- $_ := set $extra "http" (printf "http://%s:8100" $pod) }}
{{- $_ := set $extra "role" .role }}
{{- end }}
{{- $engine := dict "kv_connector" "KvwireConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra }}
{{- if .Values.store.enabled }}
{{- $tier := printf "kvwire://%s-store:7500?psk_file=/key/key" .release }}
{{- $store := dict "kv_connector" "KvwireStoreConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" (dict "tiers" (list "memory:1GiB" $tier)) }}
{{- toJson (dict "kv_connector" "MultiConnector" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" (dict "connectors" (list $engine $store))) }}
{{- else }}
{{- toJson $engine }}
{{- end }}
{{- end }}
