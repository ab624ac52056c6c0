"""The served model: checkpoints, the experts of this rank, and the communicator for them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from crossdock.common import log
from crossdock.common.config import WorkerConfig
from crossdock.worker.checkpoints.checkpoint import Checkpoint, CheckpointError, ModelSpec
from crossdock.worker.checkpoints.expert_sources import Disk, Sources
from crossdock.worker.checkpoints.weights import FLOAT, Format
from crossdock.worker.experts import device as devices
from crossdock.worker.experts.expert_mlps import ExpertMLPs, HeldLayer, Weights
from crossdock.worker.experts.grouped.support import compile_into
from crossdock.worker.experts.memory_need import DTYPES, available_bytes, check_memory, rank_bytes
from crossdock.worker.experts.placement import FROM_CONFIG, Holder, Placement, WeightsOf
from crossdock.worker.group.data_network import network_of, with_device
from crossdock.worker.group.digests import DigestsBeside
from crossdock.worker.group.same_weights import sum_of
from crossdock.worker.group.seat import ControlGroup
from crossdock.worker.peers.reading import Peers
from ep_kernels import Capabilities, CombineOrder, Layout, Mode, MoECommunicator, MoEConfig, Overflow
from ep_kernels.bringup import fingerprint
from ep_kernels.transports import create
from ep_kernels.transports.base import boxes

_log = log.get(__name__)
_OF_PLACEMENT = {"num_experts", "expert_map"}
"""Fields of the data plane's configuration that depend on the placement: numbers of slots, and where they are."""


MoreExperts = dict[int, HeldLayer]
"""By layer: experts that are loaded beside those that are served."""
_MAX_OTHERS = 2
"""Of a mixed group: the one that layers have, and the one that they are to have."""


class OpenCheckpoints:
    """The checkpoints that a worker reads: the one of its config, and others that are loaded while the group serves.
    For several threads: one loads, one compares; a loader of the former epoch may still read.

    Args:
        first: number 0.
    """

    def __init__(self, first: Checkpoint) -> None:
        self._first = first
        self._others: dict[WeightsOf, Checkpoint] = {}
        self._lock = threading.Lock()

    def open(self, weights: WeightsOf) -> Checkpoint:
        """The checkpoint, opened and compared with the first.

        Raises:
            CheckpointError: unreadable, of another shape, or other weights than its fingerprint says.
        """
        if not weights.number:
            return self._first
        with self._lock:
            found = self._others.get(weights) or self._checked(weights)
            self._others.pop(weights, None)
            self._others[weights] = found  # last: the first are those used longest ago
            for old in list(self._others)[:-_MAX_OTHERS]:
                self._others.pop(old).close()
            return found

    def known(self, weights: WeightsOf) -> Checkpoint | None:
        """The same, if it is open."""
        return self._others.get(weights) if weights.number else self._first

    def close(self) -> None:
        for each in (self._first, *self._others.values()):
            each.close()

    def _checked(self, weights: WeightsOf) -> Checkpoint:
        found = Checkpoint.open(weights.path)
        try:
            check_same_shape(self._first.spec, found.spec, weights.path)
            if found.spec.fingerprint != weights.fingerprint:
                got = found.spec.fingerprint
                raise CheckpointError(f"{weights.path}: fingerprint: expected {weights.fingerprint}, got {got}")
        except CheckpointError:
            found.close()
            raise
        return found


def check_same_shape(expected: ModelSpec, got: ModelSpec, path: str) -> None:
    """Raises CheckpointError: the experts of a model cannot take the place of another's; says field, expected, got."""
    for name in (field.name for field in dataclasses.fields(ModelSpec) if field.name != "fingerprint"):
        wanted, found = getattr(expected, name), getattr(got, name)
        if wanted != found:
            raise CheckpointError(f"{path}: {name}: expected {wanted} as in the model that is served, got {found}")


class Model:
    """One model on one device.

    Args:
        checkpoint: opened; closed by `close`.

    Attributes:
        dtype: of x and y.
        capabilities: of the configured transport.
        device: where experts are held and steps computed; current in the thread that made this.
        nic: its RDMA port; None: the network has none.
        boxes: where its GPU keeps what the network sends and brings, and why; "" = it has no network, or no GPU.
        peers: other members, which are asked for weights before the disk; None: they are not.
        count_read: called with a source ("peer" or "disk"), bytes that it gave, and seconds that it took.

    Raises:
        CheckpointError: an `expert_dtype` that is not supported.
        EpError: the transport does not work here, or cannot carry this model; there is no such device.
        DeviceLost: the GPU does not work.
    """

    def __init__(self, config: WorkerConfig, checkpoint: Checkpoint) -> None:
        self._config, self._checkpoint, self.spec = config, checkpoint, checkpoint.spec
        self._checkpoints = OpenCheckpoints(checkpoint)
        self.dtype = DTYPES[config.dtype] if config.dtype else checkpoint.spec.dtype
        self._crossover: int | None = config.ll_max_tokens
        self._network = network_of(config)
        self.capabilities = self._probe()
        index = config.local_rank if config.device is None else config.device
        self.device = devices.choose(self.capabilities.device_type, index, devices.num_gpus())
        devices.enter(self.device)
        if self.device.type == "cuda" and any(
            each.kind != "float" for each in self.spec.formats
        ):  # what Triton multiplies
            compile_into(config.kernel_cache_dir)
        self._held_dtype, self._widen = self._expert_dtype(), bool(config.expert_dtype)
        self._network, self.nic = with_device(self._network, devices.uuid_of(self.device), config.local_rank)
        index = self.device.index if self.device.type == "cuda" else -1
        self.boxes = "" if self._network is None or index < 0 else boxes(config.transport, self._network, index)
        self.peers: Peers | None = None
        self.count_read: Callable[[str, int, float], None] = lambda name, num_bytes, seconds: None
        self._digests, self._turn = DigestsBeside(), 0
        self._experts: ExpertMLPs | None = None
        self._more: MoreExperts = {}

    def held_layers(self) -> dict[int, HeldLayer]:
        """What this rank holds now, by layer. Any thread."""
        return self._experts.layers if self._experts is not None else {}

    def fingerprint_of(self, held: HeldLayer) -> str:
        """Of the checkpoint of these weights. Any thread."""
        return held.of.fingerprint or self.spec.fingerprint

    def digest_of(self, layer: int, expert: int, held: HeldLayer) -> int:
        """As `Checkpoint.digest`; 0: it is not known. Any thread."""
        checkpoint = self._checkpoints.known(held.of)
        return checkpoint.known_digest(layer, expert) if checkpoint is not None else 0

    @property
    def num_bytes(self) -> int:
        return self._experts.num_bytes if self._experts else 0

    @property
    def formats(self) -> tuple[Format, ...]:
        """Of the experts' weights as they are held, by layer."""
        return (FLOAT,) * len(self.spec.moe_layers) if self._widen else self.spec.formats

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row in dispatch and in combine."""
        width = self.spec.hidden_size
        return width * self.dtype.itemsize, width * (self._output_dtype or self.dtype).itemsize

    def load(self, placement: Placement, rank: int, progress: Callable[[int, int], None]) -> ExpertMLPs | None:
        """Load the experts of a rank; loaded and prepared ones are kept. None: the rank has no slots. Blocks.

        Raises:
            CheckpointError: unreadable weights, or no room for them.
            DeviceLost: the GPU does not work any more.
        """
        devices.enter(self.device)
        self._turn, ids = rank, {layer: placement.of_rank(layer, rank) for layer in self.spec.moe_layers}
        num_slots, more, self._more = len(ids[self.spec.moe_layers[0]]), self._more, {}
        if self._experts is not None and num_slots:  # one layer at a time, since two sets might not fit
            with self._sources(placement.holders) as sources:
                for layer, row in ids.items():
                    weights = placement.weights(layer)
                    staged = self._staged(layer, row, progress, weights, sources, more.pop(layer, None))
                    if staged is not None:
                        self._experts.replace(layer, row, *staged, of=weights)
            self._experts.resized()
            return self._experts
        self._experts = None
        if num_slots:
            self._experts = self._load_all(placement, ids, num_slots, progress)
        return self._experts

    def prepare(self, placement: Placement, rank: int, progress: Callable[[int, int], None]) -> None:
        """Load the experts that a rank has in a later epoch, beside those that it serves with: `load` takes them. All
        of them if there is room, so that nothing is copied then; else those that are not held. Blocks; not beside
        `load`.

        Args:
            placement, rank: of the later epoch.
            progress: as `ExpertMLPs.load`.

        Raises:
            CheckpointError: unreadable weights, or no room for them.
            DeviceLost: the GPU does not work any more.
        """
        devices.enter(self.device)
        experts, more, self._more = self._experts, MoreExperts(), {}
        rows = {layer: placement.of_rank(layer, rank) for layer in self.spec.moe_layers}
        num_slots = len(rows[self.spec.moe_layers[0]])
        if experts is None or not num_slots:
            return
        # What is held, and what is to be read beside it.
        now = {layer: experts.held(layer) for layer in rows}
        held = {layer: each for layer, each in now.items() if each.of == placement.weights(layer)}
        whole = rank_bytes(self._checkpoint, num_slots, self._held_dtype, widen=self._widen)
        sharing = placement.num_ranks if self.device.type == "cpu" else 1  # of one host's memory, at most
        if whole * sharing > available_bytes(self.device):
            known = {layer: held[layer].ids if layer in held else () for layer in rows}
            rows = {layer: tuple(each for each in row if each not in known[layer]) for layer, row in rows.items()}
            num_slots = max(map(len, rows.values()))
            check_memory(self._checkpoint, num_slots, self.device, self._held_dtype, widen=self._widen)
        with self._memory_errors(num_slots), self._sources(placement.holders) as sources:
            for layer, row in rows.items():
                if row and not (layer in held and row == held[layer].ids):
                    weights = placement.weights(layer)
                    beside, checkpoint = [held[layer]] if layer in held else [], self._checkpoints.open(weights)
                    read = experts.read(checkpoint, layer, row, progress, beside, sources)
                    more[layer] = HeldLayer(row, read, weights)
        self._synchronise()
        self._more = more

    def forget_prepared(self) -> None:
        """Another epoch is planned than the one of `prepare`, or none."""
        self._more = {}

    def release(self) -> None:
        """Hold no experts. Not while a step runs."""
        self._experts, self._more = None, {}

    def _load_all(
        self,
        placement: Placement,
        ids: dict[int, tuple[int, ...]],
        num_slots: int,
        progress: Callable[[int, int], None],
    ) -> ExpertMLPs:
        check_memory(self._checkpoint, num_slots, self.device, self._held_dtype, widen=self._widen)
        of = {layer: placement.weights(layer) for layer in ids}
        checkpoints = {layer: self._checkpoints.open(weights) for layer, weights in of.items()}
        with self._memory_errors(num_slots), self._sources(placement.holders) as sources:
            return ExpertMLPs.load(
                checkpoints, ids, dtype=self._held_dtype, widen=self._widen, device=self.device, progress=progress,
                sources=sources, of=of,
            )  # fmt: skip

    @contextlib.contextmanager
    def _sources(self, holders: Sequence[Holder], *, moves: bool = False) -> Iterator[Sources]:
        """Where experts come from: other members, then the disk. Says in the log how much came from where. moves: of
        one layer while the group serves, when no digests are needed yet."""
        read = Counter[str]()
        began = time.monotonic()

        def count(name: str, num_bytes: int, seconds: float) -> None:
            read[name] += num_bytes
            self.count_read(name, num_bytes, seconds)

        disk = Disk() if moves else Disk(self._digests.add)
        if self.peers is None or not holders:
            yield Sources((disk,), count)
        else:
            with self.peers.source(holders, self._turn, self.device) as source:
                yield Sources((source, disk), count)
        if read:
            seconds, say = round(time.monotonic() - began, 3), _log.debug if moves else _log.info
            say("experts read", **{f"{name}_bytes": count for name, count in read.items()}, seconds=seconds)

    def stage(
        self,
        layer: int,
        ids: Sequence[int],
        progress: Callable[[int, int], None],
        weights: WeightsOf = FROM_CONFIG,
        holders: Sequence[Holder] = (),
    ) -> Weights | None:
        """Weights of one layer for other experts than are loaded, or of another checkpoint; None: they are these.
        `holders`: members that may have them. Blocks; not beside `load`.

        Raises:
            CheckpointError: unreadable weights, or no room for them.
            DeviceLost: the GPU does not work any more.
        """
        with self._sources(holders, moves=True) as sources:
            return self._staged(layer, ids, progress, weights, sources)

    def _staged(
        self,
        layer: int,
        ids: Sequence[int],
        progress: Callable[[int, int], None],
        weights: WeightsOf,
        sources: Sources,
        more: HeldLayer | None = None,
    ) -> Weights | None:
        """See `stage`; `more`: experts that were prepared."""
        experts = self._experts
        if experts is None or (experts.held(layer).ids == tuple(ids) and experts.held(layer).of == weights):
            return None
        devices.enter(self.device)
        checkpoint = self._checkpoints.open(weights)
        more = more if more is not None and more.of == weights else None
        with self._memory_errors(len(ids)):
            staged = experts.stage(checkpoint, layer, ids, progress, of=weights, more=more, sources=sources)
        self._synchronise()
        return staged

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def sum(self, placement: Placement, rank: int | None = None) -> int:
        """Of the digests of a rank's experts, or of all, with the files of this worker; reads those that were not
        read. Blocks.

        Raises:
            CheckpointError: unreadable weights.
        """
        sources = {layer: self._checkpoints.open(placement.weights(layer)) for layer in self.spec.moe_layers}
        return sum_of(  # from the last layer on: `_digests` comes from the first
            source.digest(layer, expert)
            for layer, source in reversed(sources.items())
            for expert in (range(self.spec.num_experts) if rank is None else set(placement.of_rank(layer, rank)))
        )

    def read_all(self, placement: Placement) -> tuple[list[int], int]:
        """`sum` of each rank, and of all experts. Blocks, and gives the calling thread the lowest priority."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        return [self.sum(placement, rank) for rank in range(placement.num_ranks)], self.sum(placement)

    def is_read(self, placement: Placement) -> bool:
        return all(self._checkpoints.open(placement.weights(layer)).is_read for layer in self.spec.moe_layers)

    def connect(self, group: ControlGroup, num_slots: int) -> MoECommunicator:
        """Build the communicator of an epoch, over slots. Blocks until the first barrier has proved every link.

        Raises:
            EpError: a peer did not come, the ranks differ, or the epoch is over.
            DeviceLost: the GPU does not work any more.
        """
        devices.enter(self.device)
        return MoECommunicator(self._communicator_config(group, num_slots))

    def communicator_settings(self) -> dict[str, str]:
        """By name, as text: what must be equal in the communicators of all ranks, apart from what the placement gives.
        A difference in a setting is refused at registration; in the rest, when the communicators are built."""
        fields = fingerprint(self._communicator_config(_Alone(), self.spec.num_experts))
        return {name: value for name, value in fields.items() if name not in _OF_PLACEMENT}

    def close(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self._checkpoints.close()

    @property
    def _output_dtype(self) -> torch.dtype | None:
        """Dtype of combine. By default float32 on a CPU, the output of the experts there, so that only the final sum is
        rounded; the served dtype on a GPU."""
        if self._config.combine_dtype:
            return DTYPES[self._config.combine_dtype]
        return torch.float32 if self.capabilities.device_type == "cpu" else None

    def _expert_dtype(self) -> torch.dtype:
        held = DTYPES[self._config.expert_dtype] if self._config.expert_dtype else self.dtype
        if held is not self.dtype and (held is not torch.float32 or self.device.type != "cpu"):
            wider = ", or torch.float32" if self.device.type == "cpu" else ""
            raise CheckpointError(f"expert_dtype: expected {self.dtype}{wider} on {self.device}, got {held}")
        return held

    @contextlib.contextmanager
    def _memory_errors(self, num_experts: int) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CheckpointError(
                f"{num_experts} experts do not fit on {self.device}; more workers? {error}"
            ) from error

    def _probe(self) -> Capabilities:
        transport = create(self._moe_config(_Alone(), self.spec.num_experts))
        try:
            if self._crossover is None:  # regions are exchanged once in an epoch: nothing can be agreed on before
                self._crossover = transport.ll_max_tokens()
            return transport.capabilities
        finally:
            transport.close()

    def _communicator_config(self, group: object, num_slots: int) -> MoEConfig:
        policy: dict[str, Any] = {}
        if self.device.type != "cpu":  # no counts on the host: worst-case rows, so no row is dropped
            policy = {"exact_shapes": False, "overflow": Overflow.DROP, "max_in_flight": 1}
        return self._moe_config(group, num_slots, output_dtype=self._output_dtype, **policy)

    def _moe_config(self, group: object, num_slots: int, **fields: Any) -> MoEConfig:
        return MoEConfig(
            group=group,
            num_experts=num_slots,
            hidden_size=self.spec.hidden_size,
            topk=self.spec.topk,
            max_tokens_per_rank=self._config.max_tokens_per_step,
            mode=Mode.AUTO,
            ll_max_tokens=self._crossover,
            dispatch_sms=self._config.dispatch_sms,
            combine_sms=self._config.combine_sms,
            layout=Layout.GROUPED,
            dtype=self.dtype,
            combine_order=CombineOrder(self._config.combine_order),
            two_hop_tokens=self._config.two_hop_tokens,
            timeout_s=self._config.step_timeout_s,
            transport=self._config.transport,
            network=self._network,
            memory_handle=self._config.memory_handle,
            kernel_cache_dir=self._config.kernel_cache_dir or None,
            **fields,
        )


class _Alone:
    """A group of one, to probe the capabilities of a transport."""

    rank, size, epoch = 0, 1, 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        return [payload]
