"""A real group under a steady load: workers of one host, or of two that a cable joins, and a client for each rank."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from crossdock.common import rpc
from crossdock.common.config import ControlConfig, WorkerConfig
from crossdock.common.control_channel import current_view
from crossdock.common.settings import TracingConfig, WorkerNetworkConfig
from crossdock.demo import hosts
from crossdock.host.supervisor import Supervisor
from crossdock.protocol import wire
from crossdock.protocol.v1 import control_pb2 as pb
from crossdock.protocol.v1 import expert_pb2
from tests.services.cluster import ANSWER_S, FORM_S, Caller

E, H, INNER, K = 16, 256, 1024, 2
LEASE_S = 3.0
TOKENS, PERIOD_S = 96, 0.1


def write_model(folder: Path) -> None:
    """One MoE layer of random float32 experts, large enough that their time shows."""
    shapes = {"gate_proj": (INNER, H), "up_proj": (INNER, H), "down_proj": (H, INNER)}
    tensors = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": torch.randn(shape) * 0.05
        for expert in range(E)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        f'{{"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": {E}, "hidden_size": {H},'
        f' "moe_intermediate_size": {INNER}, "num_experts_per_tok": {K}, "hidden_act": "silu", "dtype": "float32"}}'
    )


class Load:
    """A client for each rank that asks every PERIOD_S, or as soon as it is answered."""

    def __init__(self, addresses: list[str]) -> None:
        self.favoured: tuple[int, ...] = ()
        """Experts that every token chooses first."""
        self.asked = self.failed = self.answered_tokens = 0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in addresses]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the clients."""
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_S)

    def _ids(self) -> torch.Tensor:
        scores = torch.rand(TOKENS, E)
        if self.favoured:
            scores[:, list(self.favoured)] += 1
        return scores.topk(K).indices.int()

    def _run(self, address: str) -> None:
        with Caller(address) as caller:
            number = 0
            while not self._stop.wait(PERIOD_S):
                number += 1
                message = expert_pb2.ForwardRequest(
                    id=number, layer=0, x=wire.encode(torch.randn(TOKENS, H)), topk_ids=wire.encode(self._ids()),
                    topk_weights=wire.encode(torch.rand(TOKENS, K)),
                )  # fmt: skip
                self.asked += 1
                try:
                    failed = caller.send(message).result(ANSWER_S).HasField("error")
                    with self._lock:
                        self.failed += failed
                        self.answered_tokens += 0 if failed else TOKENS
                except Exception:
                    self.failed += 1
                    return


@dataclass
class Group:
    """A serving group.

    Attributes:
        supervisors: of each host.
        places: the hosts; where there are two, the first one's end of the cable is the device `cable`.
        target: its control plane.
        load: on it.
        ranks: worker pid by rank.
    """

    supervisors: list[Supervisor]
    places: tuple[hosts.HostPlace, ...]
    target: str
    load: Load
    ranks: list[int]

    def view(self) -> pb.GroupView:
        """The group as it is now."""
        with rpc.channel(self.target) as channel:
            return current_view(channel, ANSWER_S)


def _worker(
    folder: Path, number: int, host: int, place: hosts.HostPlace, num_hosts: int, tracing: TracingConfig | None
) -> WorkerConfig:
    plain = WorkerConfig(
        model=str(folder / "model"), local_rank=number, uid=f"host-{host}/{number}", dtype="float32",
        max_tokens_per_step=128, torch_threads=1, step_timeout_s=60, tracing=tracing,
    )  # fmt: skip
    if num_hosts == 1:
        return plain
    free = f"{place.address}:0"
    network = WorkerNetworkConfig(listen=free, domain=f"host-{host}")
    return msgspec.structs.replace(plain, listen=free, http_listen=free, network=network)


@contextlib.contextmanager
def group(folder: Path, num_ranks: int, num_hosts: int = 1, tracing: TracingConfig | None = None) -> Iterator[Group]:
    """Start one, give it, stop it. Two hosts need this process to be in a network namespace (`hosts.become`)."""
    write_model(folder / "model")
    each = num_ranks // num_hosts
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(hosts.namespaces()) if num_hosts > 1 else hosts.LOOPBACK
        free = f"{places[0].address}:0"
        control = ControlConfig(listen=free, http_listen=free, world_size=num_ranks, lease_s=LEASE_S)
        supervisors: list[Supervisor] = []
        for host in range(num_hosts):
            workers = [_worker(folder, number, host, places[host], num_hosts, tracing) for number in range(each)]
            if host:
                workers = [msgspec.structs.replace(w, control=supervisors[0].control_address) for w in workers]
            logs, enter = folder / f"logs-{host}", places[host].enter
            made = Supervisor(control if not host else None, workers, logs, enter=enter)
            supervisors.append(stack.enter_context(made))
        view = supervisors[0].wait_serving(FORM_S)
        pids = {f"host-{host}/{n}": pid for host, s in enumerate(supervisors) for n, pid in enumerate(s.worker_pids())}
        members = sorted(view.members, key=lambda member: member.rank)
        load = Load([member.address for member in members])
        stack.callback(load.stop)
        ranks = [pids[member.worker.uid] for member in members]
        time.sleep(2)
        yield Group(supervisors, places, supervisors[0].control_address, load, ranks)
