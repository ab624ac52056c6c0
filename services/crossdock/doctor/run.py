"""Everything that `crossdock doctor` looks at, in order, and how it is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from crossdock.common import transports
from crossdock.common.config import ConfigFileError
from crossdock.common.log import printable
from crossdock.common.security import Security
from crossdock.common.settings import WorkerNetworkConfig
from crossdock.control.topology.discovery import join
from crossdock.doctor import hardware, rdma, reach, system, trial
from crossdock.doctor.findings import Finding, Level, ok, skipped
from crossdock.protocol.v1 import topology_pb2
from crossdock.topo.facts import host_facts
from ep_kernels.topology import HostFacts, probe, try_peers

_STYLES = {Level.OK: "green", Level.SKIPPED: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    """What to look at.

    Attributes:
        transport: a name, or "auto": over GPU links where two GPUs reach each other by them, else by memory.
        target: host:port of a control plane, "" = none.
        addresses: host:port of others to reach.
        passes: also try peer access, and dispatch and combine.
        security: TLS and token for the control plane; None: plain text. Its certificate is looked at too.
        network: of this host's workers, looked at too; None = none is configured.
        num_workers: on this host.
        listen, peer: host:port where a trial between two hosts meets: listen there, or connect to it; "" = neither.
        wait_s: how long the other host may take to come.
        step_timeout_s: deadline of a step of this host's workers.
    """

    transport: str = "auto"
    target: str = ""
    addresses: tuple[str, ...] = ()
    passes: bool = True
    timeout_s: float = 5.0
    security: Security | None = None
    network: WorkerNetworkConfig | None = None
    num_workers: int = 1
    listen: str = ""
    peer: str = ""
    wait_s: float = 300.0
    step_timeout_s: float = 10.0


def examine(request: DoctorRequest, facts: HostFacts | None = None) -> Iterator[Finding]:
    """Look at everything; findings come as they are made. `facts`: of this host; None: probed. Raises ConfigFileError
    for an unknown transport."""
    known = ("auto", *transports.names())
    if request.transport not in known:
        raise ConfigFileError(f"--transport: expected one of {', '.join(known)}, got {request.transport!r}")
    facts = facts or probe()
    host = host_facts(facts=facts)
    transport, num_ranks = choose(request.transport, host)
    yield from hardware.judge_host(host, needs_gpus=transports.needs_gpu(request.transport))
    yield from hardware.judge_sharing([gpu.num_processes for gpu in facts.gpus])
    chosen = reach.rdma_devices(request.network), reach.rdma_gid_index(request.network)
    yield from rdma.judge_nics(facts, rdma.read(), *chosen)
    seen = system.read()
    yield from system.judge_system(seen, num_ranks=num_ranks, has_gpus=bool(host.gpus), has_nics=bool(host.nics))
    if request.security is not None:
        yield from reach.judge_certificate(request.security)
    yield from reach.judge_addresses(request.addresses, request.timeout_s)
    if request.target:
        yield from reach.judge_group(request.target, request.timeout_s, request.security)
    yield from _network(request)
    if not request.passes:
        yield skipped("pass", "disabled (--no-pass)")
        return
    if len(host.gpus) > 1:
        trials, why = try_peers()
        yield from hardware.judge_trials(host, trials, why)
    answers = trial.run_trial(transport, num_ranks)
    over_links = transports.installed()[transport].over == transports.GPU_LINKS
    gpus = [gpu.nvlink_gbps for gpu in host.gpus] if over_links else []
    yield from trial.judge_trial(transport, answers, min(gpus, default=0.0))


def _network(request: DoctorRequest) -> Iterator[Finding]:
    """The configured network, and a trial with another host, which does the same."""
    meeting = request.listen or request.peer
    if request.network is None and not meeting:
        return
    listens = bool(request.listen)
    network = reach.trial_network(request.network, meeting, listens=listens) if meeting else request.network
    assert network is not None
    yield from reach.judge_network(network, request.num_workers)
    yield from rdma.judge_retries(network.provider, request.step_timeout_s)
    if request.passes:
        answer = trial.run_ping(network)
        yield trial.judge_ping(answer)
        yield from trial.judge_boxes(answer)
    if meeting:
        how = f"on the other host: crossdock doctor --peer {meeting}" if listens else f"at {meeting}"
        yield ok("network-meeting", f"waiting up to {request.wait_s:g} s; {how}")
        transport = next(name for name in transports.cross_host_names() if not transports.needs_gpu(name))
        answers = trial.run_between_hosts(transport, int(not listens), meeting, network, request.wait_s)
        yield from trial.judge_trial(transport, answers, 0.0, name="network")


def choose(transport: str, host: topology_pb2.HostFacts) -> tuple[str, int]:
    """(transport, ranks) of the pass: all GPUs of the largest domain, or two processes."""
    domains = join([host]).domains
    largest = max((len(members) for members in domains.values()), default=0)
    facts = transports.automatic(largest) if transport == "auto" else transports.installed()[transport]
    return facts.name, facts.default_world(max(1, min(largest, trial.MOST_GPUS)), trial.CPU_RANKS)


def exit_code(findings: Sequence[Finding], *, strict: bool) -> int:
    """0 = nothing FAILs (strict: nor WARNs), else 1."""
    bad = {Level.FAIL, Level.WARN} if strict else {Level.FAIL}
    return int(any(finding.level in bad for finding in findings))


def show(findings: Iterable[Finding], console: Console) -> list[Finding]:
    """Print each finding as it comes, in printable characters, then the sum. Returns them."""
    kept = []
    for finding in findings:
        kept.append(finding)
        word = (f"{finding.level.value:<8}", _STYLES[finding.level])
        console.print(Text.assemble(word, _line(finding)), soft_wrap=True)
    counts = {level: sum(finding.level is level for finding in kept) for level in Level}
    words = ", ".join(f"{count} {level.value}" for level, count in counts.items() if count)
    console.print(Text(words, style="bold"))
    return kept


def _line(finding: Finding) -> str:
    parts = [f"{finding.check:<16} {finding.what}"]
    if finding.cause:
        parts += [f"{'':<24} cause: {finding.cause}", f"{'':<24} cure:  {finding.cure}"]
    return "\n".join(map(printable, parts))


def as_dict(findings: Sequence[Finding], *, strict: bool) -> dict[str, Any]:
    plain = [{**asdict(finding), "level": finding.level.value} for finding in findings]
    return {"ok": exit_code(findings, strict=strict) == 0, "findings": plain}
