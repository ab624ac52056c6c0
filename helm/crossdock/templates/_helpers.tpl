{{/* The release's name; of a dependency with the chart's or its alias behind it. At most 42 characters, so that NAME-worker-0-HASH,
a label of the pods of a LeaderWorkerSet, has at most 63; a longer one is cut and keeps a hash. */}}
{{- define "crossdock.name" -}}
{{- $suffix := .Values.nameOverride | default (ternary "" .Chart.Name .Chart.IsRoot) -}}
{{- $name := .Values.fullnameOverride | default (list .Release.Name $suffix | compact | join "-") -}}
{{- if gt (len $name) 42 -}}
{{- $name = printf "%s-%s" ($name | trunc 33 | trimSuffix "-") ($name | sha256sum | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "crossdock.selector" -}}
app.kubernetes.io/name: crossdock
app.kubernetes.io/instance: {{ include "crossdock.name" . | quote }}
{{- end -}}

{{- define "crossdock.ownLabels" -}}
{{ include "crossdock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | trunc 63 }}
{{- end -}}

{{- define "crossdock.labels" -}}
{{ include "crossdock.ownLabels" . }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The image of a part, a container's two fields. Takes (list . part). */}}
{{- define "crossdock.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $repository := get $image (index . 1) -}}
image: {{ contains "@" $repository | ternary $repository (printf "%s:%s" $repository ($image.tag | default (index . 0).Chart.AppVersion)) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* How metrics of this release's group are told from others'. */}}
{{- define "crossdock.group" -}}
{{- .Values.group | default (printf "%s/%s" .Release.Namespace (include "crossdock.name" .)) -}}
{{- end -}}

{{/* By what a worker's pod names its PodGroup. Takes (list . part field), the field being labels or annotations. */}}
{{- define "crossdock.podGroup" -}}
{{- $by := (index . 0).Values.worker.queue.by -}}
{{- $name := printf "%s-worker" (include "crossdock.name" (index . 0)) -}}
{{- if and (eq (index . 1) "worker") (eq $by "volcano") (eq (index . 2) "annotations") -}}
scheduling.k8s.io/group-name: {{ $name }}
{{- else if and (eq (index . 1) "worker") (eq $by "coscheduling") (eq (index . 2) "labels") -}}
scheduling.x-k8s.io/pod-group: {{ $name }}
{{- end -}}
{{- end -}}

{{/* Metadata of the workers' set: its labels, and the queue by which Kueue admits it, or LeaderWorkerSet tells Volcano. */}}
{{- define "crossdock.workerMetadata" -}}
{{- $queue := .Values.worker.queue -}}
name: {{ include "crossdock.name" . }}-worker
labels:
  {{- include "crossdock.labels" . | nindent 2 }}
  {{- if eq $queue.by "kueue" }}
  kueue.x-k8s.io/queue-name: {{ $queue.name }}
  {{- end }}
{{- if and (eq $queue.by "volcano") $queue.name }}
annotations:
  scheduling.volcano.sh/queue-name: {{ $queue.name }}
{{- end }}
{{- end -}}

{{/* Metadata of a part's pod. Takes (list . part port), the port being that of /metrics. */}}
{{- define "crossdock.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $values := index $root.Values $part -}}
labels:
  {{- include "crossdock.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ $part }}
  {{- with merge (include "crossdock.podGroup" (list $root $part "labels") | fromYaml) $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include (printf "crossdock.%sConfig" $part) $root | sha256sum }}
  {{- $group := include "crossdock.podGroup" (list $root $part "annotations") | fromYaml }}
  {{- with merge $group $values.podAnnotations (include "crossdock.scrape" (list $root (index . 2)) | fromYaml) }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Fields of a part's pod that values give. Takes (list . part own), where `own` has the chart's own answers. */}}
{{- define "crossdock.podFields" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
{{- $given := pick $values "priorityClassName" "runtimeClassName" "schedulerName" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "initContainers" "hostNetwork" -}}
{{- $given = merge (pick (index . 0).Values "imagePullSecrets") (index . 2) $given -}}
{{- $fields := dict "securityContext" (index . 0).Values.podSecurityContext -}}
{{- range $name, $value := $given -}}
{{- if $value -}}
{{- $_ := set $fields $name $value -}}
{{- end -}}
{{- end -}}
{{- toYaml $fields -}}
{{- end -}}

{{/* Probes of a part's container. Takes (list . part port), the port being named. */}}
{{- define "crossdock.liveness" -}}
{{- $livez := dict "httpGet" (dict "path" "/livez" "port" (index . 2) "scheme" (include "crossdock.httpScheme" (index . 0))) -}}
livenessProbe: {{- merge (dict "periodSeconds" 10 "timeoutSeconds" 5) $livez | toYaml | nindent 2 }}
startupProbe: {{- merge (deepCopy (index (index . 0).Values (index . 1)).startupProbe) $livez | toYaml | nindent 2 }}
{{- end -}}

{{/* "yes" where a worker locks memory by a capability. Kubernetes gives capabilities to root only. */}}
{{- define "crossdock.locks" -}}
{{- if and .Values.worker.rdma.resource .Values.worker.rdma.ipcLock -}}yes{{- end -}}
{{- end -}}

{{/* The worker's container: as every container, but that it may lock memory. */}}
{{- define "crossdock.workerSecurity" -}}
{{- $security := deepCopy .Values.containerSecurityContext -}}
{{- if include "crossdock.locks" . -}}
{{- $security = mergeOverwrite $security (dict "runAsNonRoot" false "runAsUser" 0 "capabilities" (dict "add" (list "IPC_LOCK"))) -}}
{{- end -}}
{{- toYaml $security -}}
{{- end -}}

{{/* "yes" where the control plane reads labels of nodes. */}}
{{- define "crossdock.readsNodes" -}}
{{- if kindIs "map" (get .Values.control.config "kubernetes") -}}yes{{- end -}}
{{- end -}}

{{- define "crossdock.controlAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ include "crossdock.name" . }}-control
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* "yes" where a resource type of the Prometheus Operator is to be made. Takes (list . value kind). */}}
{{- define "crossdock.monitors" -}}
{{- $root := index . 0 -}}
{{- $asked := index . 1 -}}
{{- $known := $root.Capabilities.APIVersions.Has (printf "monitoring.coreos.com/v1/%s" (index . 2)) -}}
{{- if or (and (kindIs "invalid" $asked) $known) (eq (toString $asked) "true") -}}yes{{- end -}}
{{- end -}}

{{/* One port of a PodMonitor. Takes (list . port name), the name being that in the server's certificate. */}}
{{- define "crossdock.endpoint" -}}
{{- $root := index . 0 -}}
- port: {{ index . 1 }}
  path: /metrics
  interval: {{ $root.Values.monitoring.interval }}
  {{- with $root.Values.monitoring.relabelings }}
  relabelings: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- if eq (include "crossdock.httpScheme" $root) "HTTPS" }}
{{- $secret := printf "%s-client-tls" (include "crossdock.name" $root) }}
  scheme: https
  tlsConfig:
    ca: {secret: {name: {{ $secret }}, key: ca.crt}}
    {{- if eq $root.Values.tls.http "mtls" }}
    cert: {secret: {name: {{ $secret }}, key: tls.crt}}
    keySecret: {name: {{ $secret }}, key: tls.key}
    {{- end }}
    serverName: {{ index . 2 }}
{{- end }}
{{- end -}}

{{/* Annotations for a Prometheus without the operator. Takes (list . port). */}}
{{- define "crossdock.scrape" -}}
{{- if (index . 0).Values.monitoring.scrapeAnnotations -}}
prometheus.io/scrape: "true"
prometheus.io/port: {{ index . 1 | quote }}
prometheus.io/path: /metrics
prometheus.io/scheme: {{ include "crossdock.httpScheme" (index . 0) | lower }}
{{- end -}}
{{- end -}}

{{/* "yes" where control planes stand for election: more than one, or asked for. */}}
{{- define "crossdock.elects" -}}
{{- if or (gt (int .Values.control.replicas) 1) (kindIs "map" (get .Values.control.config "election")) -}}yes{{- end -}}
{{- end -}}

{{- define "crossdock.lease" -}}
{{- get (get .Values.control.config "election" | default dict) "lease_name" | default (include "crossdock.name" .) -}}
{{- end -}}

{{/* The TLS settings of every part, as YAML; its Secret is mounted there. */}}
{{- define "crossdock.security" -}}
cert_file: /etc/crossdock-tls/tls.crt
key_file: /etc/crossdock-tls/tls.key
ca_file: /etc/crossdock-tls/ca.crt
control_name: crossdock-control
worker_name: crossdock-worker
{{- if ne .Values.tls.http "plain" }}
http: {{ .Values.tls.http }}
{{- end }}
{{- end -}}

{{/* The scheme of /metrics, /livez and /readyz. */}}
{{- define "crossdock.httpScheme" -}}
{{- if and .Values.tls.enabled (ne .Values.tls.http "plain") -}}HTTPS{{- else -}}HTTP{{- end -}}
{{- end -}}

{{/* The volume of a part's Secret. Takes (list . part). */}}
{{- define "crossdock.tlsVolume" -}}
- name: tls
  secret:
    secretName: {{ include "crossdock.name" (index . 0) }}-{{ index . 1 }}-tls
    defaultMode: 288
{{- end -}}

{{- define "crossdock.controlConfig" -}}
{{- $own := dict "listen" "0.0.0.0:7400" "http_listen" "0.0.0.0:7401" "world_size" (mul .Values.worker.hosts .Values.worker.numWorkers) "group" (include "crossdock.group" .) -}}
{{- with .Values.worker.scaling -}}
{{- if .maxHosts -}}
{{- $size := $.Values.worker.numWorkers -}}
{{- $own = merge $own (dict "follow_workers" true "min_workers" (mul (max 1 (int .minHosts)) $size) "max_workers" (mul .maxHosts $size)) -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $own = merge $own (dict "security" (include "crossdock.security" . | fromYaml)) -}}
{{- end -}}
{{- if include "crossdock.elects" . -}}
{{- $election := get .Values.control.config "election" | default dict -}}
{{- $own = merge $own (dict "election" (merge (dict "lease_name" (include "crossdock.lease" .) "namespace" .Release.Namespace) $election)) -}}
{{- end -}}
{{- merge $own .Values.control.config | toYaml -}}
{{- end -}}

{{- define "crossdock.workerConfig" -}}
{{- $control := printf "%s-control:7400" (include "crossdock.name" .) -}}
{{- $model := printf "/models/%s" .Values.worker.model.path | trimSuffix "/" -}}
{{- $own := dict "model" $model "control" $control "uid" (include "crossdock.name" .) "listen" "0.0.0.0:7500" "http_listen" "0.0.0.0:7600" "request_port" 7800 "group" (include "crossdock.group" .) -}}
{{- if .Values.tls.enabled -}}
{{- $own = merge $own (dict "security" (include "crossdock.security" . | fromYaml)) -}}
{{- end -}}
{{- $worker := merge $own .Values.worker.config -}}
{{- if and .Values.worker.gpus (not (hasKey $worker "transport")) -}}
{{- $worker = merge (dict "transport" (first (include "crossdock.gpuTransports" . | fromJsonArray))) $worker -}}
{{- end -}}
{{- if include "crossdock.network" . -}}
{{- $_ := set $worker "network" (get $worker "network" | default dict) -}}
{{- end -}}
{{- $host := dict "worker" $worker "num_workers" .Values.worker.numWorkers "control" nil -}}
{{- $host = merge $host (dict "http_listen" "0.0.0.0:7402" "log_dir" "/tmp/crossdock" "log_to_stderr" true "stop_timeout_s" .Values.worker.stopTimeoutSeconds) -}}
{{- toYaml $host -}}
{{- end -}}

{{/* Transports that need GPUs, the preferred one first. The file is made of the transports' own facts (`make schema`). */}}
{{- define "crossdock.gpuTransports" -}}
{{- .Files.Get "gpu-transports.json" -}}
{{- end -}}

{{/* Transports whose ranks may be in several pods; likewise. */}}
{{- define "crossdock.crossHostTransports" -}}
{{- .Files.Get "cross-host-transports.json" -}}
{{- end -}}

{{/* Claims of the pod: as given, and the channel of the group's ComputeDomain, whose driver makes the template. */}}
{{- define "crossdock.workerClaims" -}}
{{- $claims := .Values.worker.resourceClaims -}}
{{- if .Values.worker.computeDomain -}}
{{- $claims = append $claims (dict "name" "channel" "resourceClaimTemplateName" (printf "%s-worker-channel" (include "crossdock.name" .))) -}}
{{- end -}}
{{- toYaml $claims -}}
{{- end -}}

{{/* The container's resources: as given, and its GPUs, RDMA devices and claims. */}}
{{- define "crossdock.workerResources" -}}
{{- $worker := .Values.worker -}}
{{- $resources := deepCopy ($worker.resources | default dict) -}}
{{- if $worker.gpus -}}
{{- $resources = merge $resources (dict "limits" (dict $worker.gpuResource (int $worker.gpus))) -}}
{{- end -}}
{{- if $worker.rdma.resource -}}
{{- $resources = merge $resources (dict "limits" (dict $worker.rdma.resource (int $worker.rdma.count))) -}}
{{- end -}}
{{- $claims := list -}}
{{- range include "crossdock.workerClaims" . | fromYamlArray -}}
{{- $claims = append $claims (dict "name" .name) -}}
{{- end -}}
{{- if $claims -}}
{{- $resources = merge $resources (dict "claims" $claims) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Values that contradict each other, in words. */}}
{{- define "crossdock.check" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" (include "crossdock.name" .)) -}}
{{- fail (printf "release name: expected a letter, then letters, digits and -, since Services are named after it, got %s" (include "crossdock.name" .)) -}}
{{- end -}}
{{- $worker := .Values.worker -}}
{{- $drain := get $worker.config "drain_timeout_s" | default 30.0 -}}
{{- if ge (float64 $drain) (float64 $worker.stopTimeoutSeconds) -}}
{{- fail (printf "worker.stopTimeoutSeconds: expected more than worker.config.drain_timeout_s, which is %v, got %v" $drain $worker.stopTimeoutSeconds) -}}
{{- end -}}
{{- if and $worker.gpus (ne (int $worker.gpus) (int $worker.numWorkers)) -}}
{{- fail (printf "worker.gpus: expected 0 or worker.numWorkers, which is %v, got %v" $worker.numWorkers $worker.gpus) -}}
{{- end -}}
{{- $scaling := $worker.scaling -}}
{{- if and $scaling.maxHosts (ne $worker.workload "StatefulSet") -}}
{{- fail (printf "worker.scaling.maxHosts: expected worker.workload StatefulSet, whose replicas are the group's pods, got %s" $worker.workload) -}}
{{- end -}}
{{- if and $scaling.maxHosts (or (lt (int $worker.hosts) (int $scaling.minHosts)) (gt (int $worker.hosts) (int $scaling.maxHosts))) -}}
{{- fail (printf "worker.hosts: expected minHosts to maxHosts of worker.scaling, %v to %v, got %v" $scaling.minHosts $scaling.maxHosts $worker.hosts) -}}
{{- end -}}
{{- if and (or $scaling.metrics $scaling.triggers) (or (not $scaling.maxHosts) (and $scaling.metrics $scaling.triggers)) -}}
{{- fail "worker.scaling: expected maxHosts beside metrics or triggers, and one of the two, since two autoscalers would undo each other's work" -}}
{{- end -}}
{{- $ranks := mul (max (int $worker.hosts) (int $scaling.maxHosts)) $worker.numWorkers | int -}}
{{- if and $worker.gpus (gt $ranks 1) (regexMatch "/mig-|[.]shared$" $worker.gpuResource) -}}
{{- fail (printf "worker.gpuResource: expected whole GPUs, since MIG instances have no peer access and shared ones are taken in turns (time-slicing), got %s" $worker.gpuResource) -}}
{{- end -}}
{{- if gt $ranks 64 -}}
{{- fail (printf "worker.hosts, worker.numWorkers: expected a product of at most 64, the most ranks of a group, got %d" $ranks) -}}
{{- end -}}
{{- $transport := get $worker.config "transport" | default "" | toString -}}
{{- if and (has $transport (include "crossdock.gpuTransports" . | fromJsonArray)) (not $worker.gpus) (not $worker.resourceClaims) -}}
{{- fail (printf "worker.config.transport %s: expected worker.gpus or worker.resourceClaims beside it, got neither" $transport) -}}
{{- end -}}
{{- $used := $transport -}}
{{- if and $worker.gpus (not $transport) -}}
{{- $used = first (include "crossdock.gpuTransports" . | fromJsonArray) -}}
{{- end -}}
{{- $crossHost := include "crossdock.crossHostTransports" . | fromJsonArray -}}
{{- if and (include "crossdock.network" .) $used (not (has $used $crossHost)) -}}
{{- fail (printf "worker.hosts: expected 1 and no worker.config.network with transport %s (%s joins several hosts), got %v" $used (join ", " $crossHost) $worker.hosts) -}}
{{- end -}}
{{- if and $worker.computeDomain (or (eq (int $worker.hosts) 1) (not (or $worker.gpus $worker.resourceClaims))) -}}
{{- fail (printf "worker.computeDomain: expected worker.hosts of 2 or more and worker.gpus or worker.resourceClaims beside it, got %v hosts and %v GPUs" $worker.hosts $worker.gpus) -}}
{{- end -}}
{{- $queue := $worker.queue -}}
{{- if and (eq $queue.by "kueue") (not $queue.name) -}}
{{- fail "worker.queue.by kueue: expected a LocalQueue of the namespace in worker.queue.name, got none" -}}
{{- end -}}
{{- if and $queue.name (not (has $queue.by (list "kueue" "volcano"))) -}}
{{- fail (printf "worker.queue.name: expected kueue or volcano in worker.queue.by beside it, got %s" $queue.by) -}}
{{- end -}}
{{- if and (eq $queue.by "kueue") (gt (len (include "crossdock.name" .)) 32) -}}
{{- fail (printf "worker.queue.by kueue: expected a name of at most 32 characters, since Kueue puts the set's into a label, got %s" (include "crossdock.name" .)) -}}
{{- end -}}
{{- $provider := get (get $worker.config "network" | default dict) "provider" | default "tcp" -}}
{{- if and (eq $provider "verbs") (not $worker.rdma.resource) -}}
{{- fail "worker.config.network.provider verbs: expected worker.rdma.resource beside it, which brings the devices, got none" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (regexMatch "libfabric\\(.*(tcp|udp|sockets)" $provider) -}}
{{- fail (printf "worker.config.network.provider %s: expected networkPolicy.enabled=false beside it, since libfabric listens on ports of its own choice, got true" $provider) -}}
{{- end -}}
{{- if and .Values.tls.issuer (not .Values.tls.enabled) -}}
{{- fail "tls.issuer: expected tls.enabled beside it, got false" -}}
{{- end -}}
{{- if and (ne .Values.tls.http "plain") (not .Values.tls.enabled) -}}
{{- fail "tls.http: expected tls.enabled beside it, got false" -}}
{{- end -}}
{{- if or (hasPrefix "/" $worker.model.path) (regexMatch "(^|/)[.][.](/|$)" $worker.model.path) -}}
{{- fail (printf "worker.model.path: expected a directory inside the volume, without / before it and without .., got %s" $worker.model.path) -}}
{{- end -}}
{{- if and $worker.hostNetwork .Values.networkPolicy.enabled (not .Values.networkPolicy.clients) -}}
{{- fail "worker.hostNetwork: expected the nodes' addresses in networkPolicy.clients beside it, like [{ipBlock: {cidr: 10.0.0.0/16}}], or networkPolicy.enabled=false, got none" -}}
{{- end -}}
{{- range $label := keys .Values.commonLabels -}}
{{- if has $label (include "crossdock.ownLabels" $ | fromYaml | keys) -}}
{{- fail (printf "commonLabels: expected none of the labels that the chart sets, got %s" $label) -}}
{{- end -}}
{{- end -}}
{{- range $part := list "control" "worker" -}}
{{- $values := index $.Values $part -}}
{{- $labels := concat (include "crossdock.labels" $ | fromYaml | keys) (list "app.kubernetes.io/component") -}}
{{- range $label := keys $values.podLabels -}}
{{- if has $label $labels -}}
{{- fail (printf "%s.podLabels: expected none of the labels that the chart sets, got %s" $part $label) -}}
{{- end -}}
{{- end -}}
{{- range $kind, $ours := dict "extraEnv" (list "POD_IP" "POD_NAME" "NODE_NAME") "extraVolumes" (list "config" "tls" "model" "tmp") -}}
{{- range index $values $kind -}}
{{- if has .name $ours -}}
{{- fail (printf "%s.%s: expected none of the names that the chart uses (%s), got %s" $part $kind (join ", " $ours) .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $security := get (index $.Values $part).config "security" | default dict -}}
{{- if and $.Values.tls.enabled (hasKey $security "cert_file") -}}
{{- fail (printf "%s.config.security.cert_file: expected none beside tls.enabled, got %v" $part $security.cert_file) -}}
{{- end -}}
{{- if hasKey $security "http" -}}
{{- fail (printf "%s.config.security.http: expected none (tls.http tells the probes, too), got %v" $part $security.http) -}}
{{- end -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) (include "crossdock.elects" .) -}}
{{- fail "serviceAccount.name: expected an account that may get and update the Lease (control planes stand for election and serviceAccount.create is false), got none" -}}
{{- end -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) (include "crossdock.readsNodes" .) -}}
{{- fail "serviceAccount.name: expected an account that may list nodes (control.config.kubernetes is set and serviceAccount.create is false), got none" -}}
{{- end -}}
{{- end -}}
