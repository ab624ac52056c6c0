"""What a worker serves: a checkpoint, the experts of its seat, and the communicator that fits both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossdock.common.config import WorkerConfig
from crossdock.worker import device as devices
from crossdock.worker.checkpoint import Checkpoint, CheckpointError
from crossdock.worker.experts import Experts, activation
from crossdock.worker.seat import ControlGroup, Seat
from ep_kernels import Capabilities, ExpertMap, Layout, Mode, MoECommunicator, MoEConfig, Overflow
from ep_kernels.transports import create

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model:
    """One model on one device.

    Args:
        config: of the worker.
        checkpoint: opened; closed by `close`.

    Attributes:
        spec: what the checkpoint says.
        dtype: what is served; x and y have it.
        capabilities: of the configured transport.
        device: where experts are held and steps computed; current in the thread that made this.

    Raises:
        CheckpointError: an activation that is not supported.
        EpError: the transport does not work here, or cannot carry this model; there is no such device.
        DeviceLost: the GPU does not work.
    """

    def __init__(self, config: WorkerConfig, checkpoint: Checkpoint) -> None:
        self._config, self._checkpoint, self.spec = config, checkpoint, checkpoint.spec
        activation(self.spec.hidden_act)
        self.dtype = _DTYPES[config.dtype] if config.dtype else checkpoint.spec.dtype
        self.capabilities = self._probe()
        index = config.local_rank if config.device is None else config.device
        self.device = devices.choose(self.capabilities.device_type, index, devices.num_gpus())
        devices.enter(self.device)
        self._held: tuple[tuple[int, ...], Experts | None] | None = None

    @property
    def expert_ids(self) -> tuple[int, ...]:
        """Logical ids of the experts that are loaded, by slot."""
        return self._held[0] if self._held else ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the experts that are loaded."""
        experts = self._held[1] if self._held else None
        return experts.num_bytes if experts else 0

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row on its way out (dispatch) and home (combine)."""
        width = self.spec.hidden_size
        return width * self.dtype.itemsize, width * (self._output_dtype or self.dtype).itemsize

    def load(self, seat: Seat, progress: Callable[[int, int], None]) -> Experts | None:
        """The experts of a seat; what is loaded already is kept. None: more ranks than experts. Blocks.

        Raises:
            CheckpointError: unreadable weights.
            DeviceLost: the GPU does not work any more.
        """
        devices.enter(self.device)
        ids = ExpertMap.contiguous(self.spec.num_experts, seat.size).experts_of(seat.rank)
        if self._held is None or self._held[0] != ids:
            self._held = None  # two sets might not fit
            self._held = (ids, self._read(ids, progress) if ids else None)
        return self._held[1]

    def connect(self, group: ControlGroup) -> MoECommunicator:
        """Build the communicator of an epoch. Blocks until the first barrier has proved every link.

        Raises:
            EpError: a peer did not come, the ranks differ, or the epoch is over.
            DeviceLost: the GPU does not work any more.
        """
        devices.enter(self.device)
        policy = {}
        if self.device.type != "cpu":  # nobody reads counts on the host: worst-case rows, of which none can be dropped
            policy = {"exact_shapes": False, "overflow": Overflow.DROP, "max_in_flight": 1}
        return MoECommunicator(self._moe_config(group, output_dtype=self._output_dtype, **policy))

    def close(self) -> None:
        """Unmap the checkpoint."""
        self._checkpoint.close()

    @property
    def _output_dtype(self) -> torch.dtype | None:
        """In which rows come home. By default float32 on a CPU, as the experts make them there, so that only the final
        sum is rounded; the served dtype on a GPU."""
        if self._config.home_dtype:
            return _DTYPES[self._config.home_dtype]
        return torch.float32 if self.capabilities.device_type == "cpu" else None

    def _read(self, ids: tuple[int, ...], progress: Callable[[int, int], None]) -> Experts:
        try:
            return Experts.load(self._checkpoint, ids, dtype=self.dtype, device=self.device, progress=progress)
        except torch.OutOfMemoryError as error:
            raise CheckpointError(f"{len(ids)} experts do not fit on {self.device}; more workers? {error}") from error

    def _probe(self) -> Capabilities:
        transport = create(self._moe_config(_Alone()))
        try:
            return transport.capabilities
        finally:
            transport.close()

    def _moe_config(self, group: object, **fields: Any) -> MoEConfig:
        return MoEConfig(
            group=group,
            num_experts=self.spec.num_experts,
            hidden_size=self.spec.hidden_size,
            topk=self.spec.topk,
            max_tokens_per_rank=self._config.max_tokens_per_step,
            mode=Mode.AUTO,
            layout=Layout.GROUPED,
            dtype=self.dtype,
            timeout_s=self._config.step_timeout_s,
            transport=self._config.transport,
            kernel_cache_dir=self._config.kernel_cache_dir or None,
            **fields,
        )


class _Alone:
    """A group of one, to ask a transport what it can do."""

    rank, size, epoch = 0, 1, 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `ep_kernels.Group`."""
        return [payload]
