{{- define "crossdock.name" -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "crossdock.selector" -}}
app.kubernetes.io/name: crossdock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "crossdock.labels" -}}
{{ include "crossdock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- define "crossdock.tag" -}}
{{- .Values.image.tag | default .Chart.AppVersion -}}
{{- end -}}

{{- define "crossdock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: ["ALL"]
{{- end -}}

{{- define "crossdock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "crossdock.controlConfig" -}}
{{- $own := dict "listen" "0.0.0.0:7400" "http_listen" "0.0.0.0:7401" "world_size" .Values.worker.numWorkers -}}
{{- merge $own .Values.control.config | toYaml -}}
{{- end -}}

{{- define "crossdock.hostConfig" -}}
{{- $control := printf "%s-control:7400" (include "crossdock.name" .) -}}
{{- $model := printf "/models/%s" .Values.worker.model.path | trimSuffix "/" -}}
{{- $own := dict "model" $model "control" $control "uid" (include "crossdock.name" .) "listen" "0.0.0.0:7500" "http_listen" "0.0.0.0:7600" -}}
{{- $host := dict "worker" (merge $own .Values.worker.config) "num_workers" .Values.worker.numWorkers "control" nil -}}
{{- $host = merge $host (dict "http_listen" "0.0.0.0:7402" "log_dir" "/tmp/crossdock" "log_to_stderr" true "stop_timeout_s" .Values.worker.stopTimeoutSeconds) -}}
{{- toYaml $host -}}
{{- end -}}
