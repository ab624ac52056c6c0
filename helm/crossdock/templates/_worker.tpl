{{/* The pod of a host: numWorkers ranks under one supervisor, for the transport `cpu` shares memory within a PID namespace. */}}
{{- define "crossdock.workerPod" -}}
metadata: {{- include "crossdock.podMetadata" (list . "worker" "7402") | nindent 2 }}
spec:
  {{- if .Values.serviceAccount.create }}
  serviceAccountName: {{ include "crossdock.name" . }}-worker
  {{- end }}
  automountServiceAccountToken: false
  {{- with include "crossdock.workerClaims" . | fromYamlArray }}
  resourceClaims: {{- toYaml . | nindent 4 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add .Values.worker.stopTimeoutSeconds 10 }}
  {{- $own := dict "affinity" (include "crossdock.workerAffinity" . | fromYaml) "dnsPolicy" (ternary "ClusterFirstWithHostNet" "" .Values.worker.hostNetwork) }}
  {{- if and (eq .Values.worker.queue.by "volcano") (not .Values.worker.schedulerName) }}
  {{- $own = merge $own (dict "schedulerName" "volcano") }}
  {{- end }}
  {{- include "crossdock.podFields" (list . "worker" $own) | nindent 2 }}
  containers:
    - name: worker
      {{- include "crossdock.image" (list . "worker") | nindent 6 }}
      args:
        - up
        - --config
        - /etc/crossdock/host.yaml
        {{- if include "crossdock.network" . }}
        - --set=worker.uid=$(POD_NAME)
        - --set=worker.network.listen=[$(POD_IP)]:7700
        {{- end }}
        - --set
        - "worker.advertise=[$(POD_IP)]:7500"
      env:
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: POD_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: NODE_NAME
          valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
        {{- with .Values.worker.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      ports:
        - {name: health, containerPort: 7402}
        {{- range $i := until (int .Values.worker.numWorkers) }}
        - {name: grpc-{{ $i }}, containerPort: {{ add 7500 $i }}}
        - {name: requests-{{ $i }}, containerPort: {{ add 7800 $i }}}
        {{- if include "crossdock.network" $ }}
        - {name: data-{{ $i }}, containerPort: {{ add 7700 $i }}}
        {{- end }}
        {{- end }}
      readinessProbe:
        httpGet: {path: /readyz, port: health, scheme: {{ include "crossdock.httpScheme" . }}}
        periodSeconds: 5
        timeoutSeconds: {{ add 2 .Values.worker.numWorkers }}
      {{- include "crossdock.liveness" (list . "worker" "health") | nindent 6 }}
      resources: {{- include "crossdock.workerResources" . | nindent 8 }}
      securityContext: {{- include "crossdock.workerSecurity" . | nindent 8 }}
      volumeMounts:
        - {name: config, mountPath: /etc/crossdock, readOnly: true}
        {{- if .Values.tls.enabled }}
        - {name: tls, mountPath: /etc/crossdock-tls, readOnly: true}
        {{- end }}
        - {name: model, mountPath: /models, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- with .Values.worker.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "crossdock.name" . }}-worker
    {{- if .Values.tls.enabled }}
    {{- include "crossdock.tlsVolume" (list . "worker") | nindent 4 }}
    {{- end }}
    - name: model
      {{- .Values.worker.model.volume | default (dict "persistentVolumeClaim" (dict "claimName" "models")) | toYaml | nindent 6 }}
    - name: tmp
      emptyDir: {{- toYaml .Values.worker.tmp | nindent 8 }}
    {{- with .Values.worker.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* "yes" where the data ports of workers are reached by other pods. */}}
{{- define "crossdock.network" -}}
{{- if or (include "crossdock.severalHosts" .) (kindIs "map" (get .Values.worker.config "network")) -}}yes{{- end -}}
{{- end -}}

{{/* "yes" where the group may have more than one pod. */}}
{{- define "crossdock.severalHosts" -}}
{{- if gt (max (int .Values.worker.hosts) (int .Values.worker.scaling.maxHosts)) 1 -}}yes{{- end -}}
{{- end -}}

{{/* The pod's affinity: as given; where that does not speak of other pods itself, away from the group's other pods and together
with them as values say. */}}
{{- define "crossdock.workerAffinity" -}}
{{- $affinity := deepCopy (.Values.worker.affinity | default dict) -}}
{{- if and (include "crossdock.severalHosts" .) .Values.worker.together (not (hasKey $affinity "podAffinity")) -}}
{{- $labels := merge (dict "app.kubernetes.io/component" "worker") (include "crossdock.selector" . | fromYaml) -}}
{{- $term := dict "topologyKey" .Values.worker.together "labelSelector" (dict "matchLabels" $labels) -}}
{{- $affinity = merge $affinity (dict "podAffinity" (dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term))) -}}
{{- end -}}
{{- if and (include "crossdock.severalHosts" .) (ne .Values.worker.spread "none") (not (hasKey $affinity "podAntiAffinity")) -}}
{{- $labels := merge (dict "app.kubernetes.io/component" "worker") (include "crossdock.selector" . | fromYaml) -}}
{{- $term := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" $labels) -}}
{{- $rule := dict "requiredDuringSchedulingIgnoredDuringExecution" (list $term) -}}
{{- if eq .Values.worker.spread "preferred" -}}
{{- $rule = dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- end -}}
{{- $affinity = merge $affinity (dict "podAntiAffinity" $rule) -}}
{{- end -}}
{{- toYaml $affinity -}}
{{- end -}}
