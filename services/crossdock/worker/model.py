"""What a worker serves: a checkpoint, the experts of its seat, and the communicator that fits both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from crossdock.common.config import WorkerConfig
from crossdock.worker.checkpoint import Checkpoint
from crossdock.worker.experts import Experts, activation
from crossdock.worker.seat import ControlGroup, Seat
from ep_kernels import Capabilities, ConfigError, ExpertMap, Layout, Mode, MoECommunicator, MoEConfig
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

    Raises:
        CheckpointError: an activation that is not supported.
        EpError: the transport does not work here, or cannot carry this model.
    """

    def __init__(self, config: WorkerConfig, checkpoint: Checkpoint) -> None:
        self._config, self._checkpoint, self.spec = config, checkpoint, checkpoint.spec
        activation(self.spec.hidden_act)
        self.dtype = _DTYPES[config.dtype] if config.dtype else checkpoint.spec.dtype
        self.capabilities = self._probe()
        if self.capabilities.device_type != "cpu":
            raise ConfigError(
                "worker.transport", "one that works on a CPU: no worker serves on GPUs yet", config.transport
            )
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
        """
        ids = ExpertMap.contiguous(self.spec.num_experts, seat.size).experts_of(seat.rank)
        if self._held is None or self._held[0] != ids:
            self._held = None  # two sets might not fit
            device = self.capabilities.device_type
            load = Experts.load
            experts = load(self._checkpoint, ids, dtype=self.dtype, device=device, progress=progress) if ids else None
            self._held = (ids, experts)
        return self._held[1]

    def connect(self, group: ControlGroup) -> MoECommunicator:
        """Build the communicator of an epoch. Blocks until the first barrier has proved every link.

        Raises:
            EpError: a peer did not come, the ranks differ, or the epoch is over.
        """
        return MoECommunicator(self._moe_config(group, self._output_dtype))

    def close(self) -> None:
        """Unmap the checkpoint."""
        self._checkpoint.close()

    @property
    def _output_dtype(self) -> torch.dtype | None:
        """On a CPU rows come home in float32, as the experts make them there, so only the final sum is rounded."""
        return torch.float32 if self.capabilities.device_type == "cpu" else None

    def _probe(self) -> Capabilities:
        transport = create(self._moe_config(_Alone(), None))
        try:
            return transport.capabilities
        finally:
            transport.close()

    def _moe_config(self, group: object, output_dtype: torch.dtype | None = None) -> MoEConfig:
        return MoEConfig(
            group=group,
            num_experts=self.spec.num_experts,
            hidden_size=self.spec.hidden_size,
            topk=self.spec.topk,
            max_tokens_per_rank=self._config.max_tokens_per_step,
            mode=Mode.AUTO,
            layout=Layout.GROUPED,
            dtype=self.dtype,
            output_dtype=output_dtype,
            timeout_s=self._config.step_timeout_s,
            transport=self._config.transport,
        )


class _Alone:
    """A group of one, to ask a transport what it can do."""

    rank, size, epoch = 0, 1, 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        """See `ep_kernels.Group`."""
        return [payload]
