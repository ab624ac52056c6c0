"""The Grafana dashboard, made from our table of metrics: an expression that names a metric we do not export is refused.

`make schema` writes it for the chart and for the compose file. `$group` chooses one group: groups are not added up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crossdock.common.metrics import ControlMetrics, FrameworkMetrics, HostMetrics, WorkerMetrics
from tests.house.tree import ROOT

PLACES = (
    ROOT / "helm" / "crossdock" / "dashboard.json",
    ROOT / "deploy" / "grafana" / "dashboards" / "crossdock.json",
)
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
PROCESS = "instance, process"
"""Labels of one process; one that is scraped by itself has no label `process`."""
_NAME = "{{instance}} {{process}}"


@dataclass(frozen=True)
class Panel:
    """One panel: its queries are (expression, legend); METRIC{...} in them gets the group's filter. Kinds of ours:
    `matrix`, a table with a coloured cell for each pair of labels `rank` and `peer`; `epochs`, a state-timeline."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8
    meaning: str = ""


def _quantiles(metric: str, by: str = "") -> tuple[tuple[str, str], ...]:
    group = ", ".join(filter(None, ["le", by]))
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", ") if label)
    return tuple(
        (
            f"histogram_quantile({q / 100:g}, sum by ({group}) (rate({metric}_bucket{{}}[$__rate_interval])))",
            f"p{q} {legend}".strip(),
        )
        for q in (50, 99)
    )


def _rate(metric: str, by: str, function: str = "rate") -> tuple[tuple[str, str], ...]:
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return ((f"sum by ({by}) ({function}({metric}{{}}[$__rate_interval]))", legend),)


_ROWS_OF_RANKS = "sum by (instance, process) (rate(crossdock_expert_rows_total{}[$__rate_interval]))"
_TOKENS_OF_RANKS = "sum by (rank) (rate(crossdock_ep_received_tokens_total{}[$__rate_interval]))"
_WAITS = "sum by (job, instance, process, peer) (rate(crossdock_peer_wait_seconds_total{}[$__rate_interval]))"
_RANKS = 'count_values by (job, instance, process) ("rank", crossdock_rank{} >= 0)'
_LATE = f"clamp_min({_WAITS} - on (job, {PROCESS}) group_left quantile by (job, {PROCESS}) (0.5, {_WAITS}), 0)"
_STATES = {"FORMING": ("orange", 1), "EXCHANGING": ("yellow", 2), "SERVING": ("green", 3)}
_MOVED = "rate(crossdock_wire_bytes_total{}[$__rate_interval])"
_TAKEN = 'rate(crossdock_operation_duration_seconds_sum{phase="total"}[$__rate_interval])'
_PEAK = "on (job, instance, process) group_left () (crossdock_transport_peak_bytes_per_second{} > 0)"
_DISPATCHES = 'crossdock_operation_duration_seconds_bucket{op="dispatch", phase="total"}'


ROWS: dict[str, tuple[Panel, ...]] = {
    "Health": (
        Panel("State", "none", (("max by (state) (crossdock_group_state{}) == 1", "{{state}}"),), "stat", 6),
        Panel(
            "Members",
            "none",
            (
                ("max(crossdock_members{})", "members"),
                ("min(crossdock_active_ranks{})", "active"),
                ("max(crossdock_world_size{})", "of"),
                ("max(crossdock_wanted_workers{})", "wanted"),
            ),
            "stat",
            6,
        ),
        Panel(
            "Epoch", "none", (("max(crossdock_epoch{})", "epoch"),), "stat", 6, "Each change of membership raises it."
        ),
        Panel(
            "Workers by state", "none", (("max by (state) (crossdock_member_states{}) > 0", "{{state}}"),), "stat", 6
        ),
        Panel(
            "Epochs",
            "none",
            (
                (
                    " or ".join(
                        f'max(crossdock_group_state{{state="{name}"}} == 1) * {number}'
                        for name, (_, number) in _STATES.items()
                    ),
                    "state",
                ),
                ("max(crossdock_epoch{})", "epoch"),
            ),
            "epochs",
            16,
        ),
        Panel(
            "Re-forms",
            "none",
            _rate("crossdock_reform_duration_seconds_count", "cause", "increase"),
            meaning="By what ended the epoch first.",
        ),
        Panel(
            "Processes",
            "none",
            (("sum(crossdock_process_up{})", "up"), ("sum(crossdock_process_scraped{})", "scraped")),
            "stat",
            6,
        ),
    ),
    "Requests": (
        Panel("Tokens answered", "cps", _rate("crossdock_tokens_total", PROCESS)),
        Panel(
            "Request latency",
            "s",
            _quantiles("crossdock_request_duration_seconds", "code"),
            meaning="Including queueing.",
        ),
        Panel("Time in the queue", "s", _quantiles("crossdock_queue_duration_seconds")),
        Panel(
            "Open streams and request connections",
            "none",
            (
                ("crossdock_open_streams{}", f"{_NAME} streams"),
                ("crossdock_open_request_connections{}", f"{_NAME} connections"),
            ),
        ),
        Panel("Answers by code", "reqps", _rate("crossdock_requests_total", "code")),
        Panel("Queued requests", "none", (("crossdock_queued_requests{}", _NAME),)),
        Panel("Queued bytes", "bytes", (("crossdock_queued_bytes{}", _NAME),)),
        Panel("Steps", "ops", _rate("crossdock_steps_total", PROCESS)),
        Panel("Streams closed, answers not read", "ops", _rate("crossdock_streams_dropped_total", PROCESS)),
        Panel(
            "Telemetry dropped",
            "ops",
            (
                *_rate("crossdock_telemetry_records_dropped_total", PROCESS),
                ("sum by (op) (rate(crossdock_samples_dropped_total{}[$__rate_interval]))", "samples of {{op}}"),
            ),
        ),
    ),
    "Steps": (
        Panel("Step by phase", "s", _quantiles("crossdock_step_phase_duration_seconds", "phase"), width=12),
        Panel(
            "Dispatch and combine", "s", _quantiles("crossdock_operation_duration_seconds", "op, mode, phase"), width=12
        ),
        Panel(
            "Dispatch, every call",
            "s",
            ((f"sum by (le) (rate({_DISPATCHES}[$__rate_interval]))", "{{le}}"),),
            "heatmap",
            12,
        ),
        Panel(
            "Tokens per step, share of the most",
            "percentunit",
            (
                (
                    "sum(rate(crossdock_step_tokens_sum{}[$__rate_interval]))"
                    " / sum(rate(crossdock_step_tokens_count{}[$__rate_interval]))"
                    " / max(crossdock_max_tokens_per_step{})",
                    "fill",
                ),
            ),
        ),
        Panel(
            "Rows dropped",
            "ops",
            _rate("crossdock_rows_dropped_total", PROCESS),
            meaning="Past the receive capacity, which workers size so that no row can be.",
        ),
        Panel(
            "Since the last step",
            "s",
            (
                (
                    "time() - max by (instance, process) (crossdock_last_step_timestamp_seconds{} > 0)",
                    "{{instance}} {{process}}",
                ),
            ),
            meaning="Grows while the group is idle, too.",
        ),
        Panel(
            "Bytes between ranks",
            "Bps",
            (
                ("sum by (op) (rate(crossdock_payload_bytes_total{}[$__rate_interval]))", "{{op}}, payload"),
                (f"sum by (op) ({_MOVED})", "{{op}}, as they travel"),
            ),
        ),
        Panel(
            "Share of the bound",
            "percentunit",
            ((f"sum by (op) ({_MOVED}) / sum by (op) ({_TAKEN} * {_PEAK})", "{{op}}"),),
            meaning="Bytes as they travel, over what the rank's links could have carried in the time of the operation,"
            " waits included. On a CPU: over one processor's copy rate.",
        ),
    ),
    "Network": (
        Panel("Sent to ranks of other hosts", "Bps", _rate("crossdock_network_sent_bytes_total", PROCESS)),
        Panel(
            "Messages",
            "ops",
            (
                ("sum(rate(crossdock_network_sent_messages_total{}[$__rate_interval]))", "sent"),
                ("sum(rate(crossdock_network_received_messages_total{}[$__rate_interval]))", "received"),
            ),
        ),
        Panel(
            "Links down",
            "none",
            (("crossdock_network_link_up{} == 0", _NAME + " to rank {{peer}}"),),
            meaning="Between active ranks of different hosts.",
        ),
    ),
    "Balance": (
        Panel(
            "Who waits for whom",
            "percentunit",
            ((f"max by (rank, peer) ({_LATE} * on (job, {PROCESS}) group_left (rank) {_RANKS})", ""),),
            "matrix",
            12,
            "Share of its time that a rank (row) waits for a peer (column) beyond the typical one. A bright column is a"
            " slow rank, a bright cell a slow link.",
        ),
        Panel(
            "Waiting for",
            "percentunit",
            _rate("crossdock_peer_wait_seconds_total", "peer"),
            meaning="The highest line is not always the slow rank: the verdict says which one is.",
        ),
        Panel(
            "Verdict: steps lost to",
            "percentunit",
            (("max by (kind, subject) (crossdock_verdict_lost_ratio{})", "{{kind}}: {{subject}}"),),
            meaning="Empty while nothing is slow.",
        ),
        Panel(
            "Hottest experts",
            "cps",
            (("topk(10, sum by (expert) (rate(crossdock_expert_rows_total{}[$__rate_interval])))", "{{expert}}"),),
        ),
        Panel(
            "Rows per rank, largest to mean",
            "none",
            ((f"max({_ROWS_OF_RANKS}) / avg({_ROWS_OF_RANKS})", "imbalance"),),
        ),
        Panel(
            "Imbalance of the placement",
            "none",
            (("max(crossdock_expert_imbalance_ratio{})", "now"),),
            meaning="1 is perfect.",
        ),
        Panel("Copies of experts loaded", "none", _rate("crossdock_expert_copies_loaded_total", PROCESS, "increase")),
        Panel(
            "Bytes of experts read, and by others here",
            "bytes",
            (
                *_rate("crossdock_expert_read_bytes_total", "source", "increase"),
                ("sum(increase(crossdock_expert_given_bytes_total{}[$__rate_interval]))", "by others"),
            ),
        ),
        Panel(
            "Seconds of reading experts, and holders given up",
            "short",
            (
                *_rate("crossdock_expert_read_seconds_total", "source", "increase"),
                *_rate("crossdock_expert_holder_failures_total", "reason", "increase"),
            ),
        ),
        Panel("Delay of steps by a switch", "s", _quantiles("crossdock_expert_switch_duration_seconds")),
    ),
    "Faults": (
        Panel("Timeouts", "none", _rate("crossdock_peer_timeouts_total", "peer", "increase")),
        Panel("Members lost", "none", _rate("crossdock_members_lost_total", "cause", "increase")),
        Panel("Ranks reported silent", "none", _rate("crossdock_silent_rank_reports_total", "rank", "increase")),
        Panel(
            "Excluded workers and sick ranks",
            "none",
            (("sum by (cause) (crossdock_excluded_workers{})", "{{cause}}"), ("max(crossdock_sick_ranks{})", "sick")),
        ),
        Panel("Seconds without service", "s", _quantiles("crossdock_reform_duration_seconds", "cause")),
        Panel("State transitions", "none", _rate("crossdock_group_state_transitions_total", "to", "increase")),
        Panel("Restarts", "none", _rate("crossdock_process_restarts_total", "process", "increase")),
    ),
    "Control plane": (
        Panel("Calls", "s", _quantiles("crossdock_rpc_duration_seconds", "method")),
        Panel("Calls by code", "reqps", _rate("crossdock_rpc_duration_seconds_count", "code")),
        Panel("Watchers", "none", (("crossdock_watch_streams{}", _NAME),)),
        Panel(
            "Leader",
            "none",
            (
                ("crossdock_is_leader{}", _NAME),
                ("crossdock_leader_term{}", f"term of {_NAME}"),
            ),
        ),
        Panel("New leader terms", "none", _rate("crossdock_leader_terms_total", PROCESS, "increase")),
        Panel("Failed lease requests", "none", _rate("crossdock_leader_lease_failures_total", PROCESS, "increase")),
        Panel(
            "Placement",
            "none",
            (
                ("max(crossdock_placement_version{})", "version"),
                *_rate("crossdock_expert_moves_total", "result", "increase"),
            ),
        ),
    ),
    "Processes": (
        Panel("Event loop's delay", "s", _quantiles("crossdock_event_loop_lag_seconds", PROCESS), width=12),
        Panel(
            "GPU memory in use",
            "bytes",
            (("crossdock_device_memory_used_bytes{} > 0", _NAME),),
            width=12,
        ),
    ),
    "Security": (
        Panel("Refused calls", "reqps", _rate("crossdock_rpc_refusals_total", "reason")),
        Panel("Log lines of gRPC's core", "cps", _rate("crossdock_grpc_core_log_lines_total", "topic")),
        Panel(
            "Certificates expire in",
            "s",
            (("(crossdock_certificate_expiry_timestamp_seconds{} > 0) - time()", _NAME),),
        ),
        Panel("Certificate reloads", "none", _rate("crossdock_certificate_reloads_total", "result", "increase")),
    ),
    "Inside vLLM and other engines": (
        Panel("Dispatch and combine", "s", _quantiles("crossdock_ep_operation_duration_seconds", "op, mode, phase")),
        Panel("Tokens", "cps", _rate("crossdock_ep_tokens_total", "rank")),
        Panel("Samples dropped", "ops", _rate("crossdock_ep_samples_dropped_total", "rank")),
        Panel(
            "Rows dropped",
            "ops",
            _rate("crossdock_ep_rows_dropped_total", "rank"),
            meaning="Past the receive capacity (max_recv_rows).",
        ),
        Panel("Bytes received", "Bps", _rate("crossdock_ep_received_bytes_total", "rank")),
        Panel(
            "Tokens received, largest rank to mean",
            "none",
            ((f"max({_TOKENS_OF_RANKS}) / avg({_TOKENS_OF_RANKS})", "imbalance"),),
            meaning="1 is perfect.",
        ),
        Panel(
            "Waiting for",
            "percentunit",
            _rate("crossdock_ep_peer_wait_seconds_total", "peer"),
            meaning="The highest line is the slow rank.",
        ),
        Panel("Timeouts", "none", _rate("crossdock_ep_peer_timeouts_total", "peer", "increase")),
    ),
}


def exported() -> set[str]:
    """Names of series: those of histograms with their endings."""
    names = set()
    for metrics in (WorkerMetrics(), ControlMetrics(), HostMetrics(), FrameworkMetrics()):
        for metric in metrics.declarations():
            endings = ("_bucket", "_count", "_sum") if metric.kind == "histogram" else ("",)
            names |= {metric.name + ending for ending in endings}
    return names


def _filtered(expression: str, known: set[str]) -> str:
    """With the group's filter at every metric; raises ValueError for a metric that nobody exports."""

    def one(match: re.Match[str]) -> str:
        if match[1] not in known:
            raise ValueError(f"dashboard: expected an exported metric, got {match[1]}")
        inside = ", ".join(filter(None, ['job=~"$job"', 'group="$group"', match[2]]))
        return f"{match[1]}{{{inside}}}"

    named = set(re.findall(r"\bcrossdock_\w+", expression))
    made = re.sub(r"\b(crossdock_\w+)\{([^}]*)\}", one, re.sub(r"\b(crossdock_\w+)(?=[\[)])", r"\1{}", expression))
    if unknown := named - known:
        raise ValueError(f"dashboard: expected exported metrics, got {sorted(unknown)}")
    return made


def _panels() -> Iterator[dict[str, Any]]:
    known = exported()
    number = x = y = 0
    for title, panels in ROWS.items():
        number += 1
        y += HEIGHT if x else 0
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": HEIGHT}, known)
            x += panel.width


def _panel(panel: Panel, number: int, place: dict[str, int], known: set[str]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": SOURCE,
            "expr": _filtered(expression, known),
            "legendFormat": legend,
            "format": {"heatmap": "heatmap", "matrix": "table"}.get(panel.kind, "time_series"),
            "instant": panel.kind == "matrix",
            "range": panel.kind != "matrix",
        }
        for i, (expression, legend) in enumerate(panel.queries)
    ]
    made: dict[str, Any] = {
        "id": number,
        "type": {"matrix": "table", "epochs": "state-timeline"}.get(panel.kind, panel.kind),
        "title": panel.title,
        "description": panel.meaning,
        "datasource": SOURCE,
        "gridPos": place,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
    }
    if panel.kind == "stat":
        made["options"] = {"textMode": "value_and_name", "reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "heatmap":
        made["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}}
    if panel.kind == "matrix":
        _as_matrix(made)
    if panel.kind == "epochs":
        _as_timeline(made)
    return made


def _as_matrix(made: dict[str, Any]) -> None:
    """A row for each rank, a column for each peer, cells coloured by their value."""
    options = {"columnField": "peer", "rowField": "rank", "valueField": "Value"}
    made["transformations"] = [
        {"id": "groupingToMatrix", "options": options},
        {"id": "sortBy", "options": {"sort": [{"field": "rank\\peer"}]}},
    ]
    cells = {"custom": {"cellOptions": {"type": "color-background", "mode": "basic"}, "align": "center"}}
    scale = {"color": {"mode": "continuous-BlYlRd"}, "min": 0, "max": 0.5, "decimals": 0}
    made["fieldConfig"]["defaults"] |= cells | scale
    made["options"] = {"showHeader": True}


def _as_timeline(made: dict[str, Any]) -> None:
    """States by name and colour; an epoch's number in each of its bars."""
    named = {
        str(number): {"text": name, "color": colour, "index": number} for name, (colour, number) in _STATES.items()
    }
    mappings = {"id": "mappings", "value": [{"type": "value", "options": named}]}
    made["fieldConfig"]["defaults"] |= {"color": {"mode": "continuous-BlPu"}, "custom": {"fillOpacity": 80}}
    made["fieldConfig"]["overrides"] = [{"matcher": {"id": "byName", "options": "state"}, "properties": [mappings]}]
    made["options"] = {"mergeValues": True, "showValue": "auto", "rowHeight": 0.8}


def _variable(name: str, query: str) -> dict[str, Any]:
    """One value of a label, chosen by hand; the first one at the start."""
    asked = {"query": {"query": query, "refId": f"{name}s"}, "definition": query, "refresh": 2, "sort": 1}
    return {"name": name, "label": name.capitalize(), "type": "query", "datasource": SOURCE, **asked}


def dashboard_json() -> str:
    """The dashboard as Grafana imports it."""
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    every = {"multi": True, "includeAll": True, "current": {"text": ["All"], "value": ["$__all"]}}
    job = _variable("job", "label_values(crossdock_build_info, job)") | every
    group = _variable("group", 'label_values({__name__=~"crossdock_build_info|crossdock_ep_.+", job=~"$job"}, group)')
    board = {
        "uid": "crossdock",
        "title": "Crossdock",
        "tags": ["crossdock"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-15m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [datasource, job, group]},
        "panels": list(_panels()),
    }
    return json.dumps(board, indent=1) + "\n"
