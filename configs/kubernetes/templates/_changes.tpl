{{- /* What is common to all objects and both DaemonSets. */ -}}

{{- define "penstock.labels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* The TOML file of the DaemonSet: the one that values give, or the chart's. */ -}}
{{- define "penstock.config" -}}
{{- if .Values.uninstall -}}
{{- .Values.uninstallConfig | default (.Files.Get "uninstall/penstock.toml") -}}
{{- else -}}
{{- .Values.config | default (.Files.Get "penstock.toml") -}}
{{- end -}}
{{- end -}}
