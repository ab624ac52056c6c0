"""Where a worker and the demo run: the choice of the device, its errors, and the way of a step's tensors there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import ANY

import msgspec
import pytest
import torch
import torch.distributed as dist

from crossdock.common.config import ConfigFileError, HostConfig, WorkerConfig, load
from crossdock.demo.stage import Stage
from crossdock.worker.checkpoints.checkpoint import CheckpointError
from crossdock.worker.experts import device as device_module
from crossdock.worker.experts.device import choose, enter, peak_bytes_per_s
from crossdock.worker.experts.placement import SlotMap
from crossdock.worker.group.model import Model
from crossdock.worker.requests.request_slots import RequestSlot
from crossdock.worker.steps.device_stream import CpuStream, stream_of
from crossdock.worker.steps.stepper import Stepper
from crossdock.worker.steps.work import Slice, Work
from ep_kernels import CombineOrder, ConfigError, Layout, MoECommunicator, MoEConfig, Overflow, StoreGroup
from ep_kernels.bringup import Hello, fingerprint
from tests.groups import LonelyGroup


def test_one_gpu_for_each_worker() -> None:
    assert [choose("cuda", index, 4) for index in range(4)] == [torch.device("cuda", index) for index in range(4)]
    assert choose("cpu", 7, 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("index", "num_gpus", "words"),
    [
        (2, 2, r"worker\.device: expected .*in 0\.\.1 \(this process sees 2\), got 2"),
        (5, 1, r"worker\.device: expected .*in 0\.\.0 \(this process sees 1\), got 5"),
        (0, 0, r"worker\.transport: expected a CUDA device for each worker, .*got 'no CUDA device'"),
    ],
)
def test_a_gpu_that_is_not_there_is_said_with_both_numbers(index: int, num_gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose("cuda", index, num_gpus)


def test_devices_of_a_host_count_up() -> None:
    def devices(worker: WorkerConfig) -> list[int | None]:
        return [each.device for each in HostConfig(worker=worker, num_workers=3).worker_configs()]

    assert devices(WorkerConfig(model="m", device=4)) == [4, 5, 6]
    assert devices(WorkerConfig(model="m")) == [None, None, None]
    with pytest.raises(ConfigFileError, match="device"):
        load(WorkerConfig, None, ["model=m", "device=-1"])


@pytest.mark.parametrize(
    ("transport", "num_workers", "num_gpus", "expected"),
    [
        ("cpu", None, 0, (4, "cpu")),
        ("cpu", 2, 8, (2, "cpu")),
        ("nvlink", None, 4, (4, "cuda:0")),
        ("nvlink", None, 16, (8, "cuda:0")),
        ("nvlink", 2, 4, (2, "cuda:0")),
    ],
)
def test_the_demos_stage(transport: str, num_workers: int | None, num_gpus: int, expected: tuple[int, str]) -> None:
    stage = Stage.of(transport, num_workers, num_gpus)
    assert (stage.num_workers, str(stage.device)) == expected
    worker = stage.worker("m", 1, "bfloat16")
    assert (worker.transport, worker.local_rank, worker.combine_dtype) == (transport, 1, "float32")


@pytest.mark.parametrize(
    ("num_workers", "num_gpus", "words"),
    [(None, 0, "nvlink: expected a CUDA device"), (3, 2, "at most one for each of 2")],
)
def test_the_demo_refuses_too_few_gpus(num_workers: int | None, num_gpus: int, words: str) -> None:
    with pytest.raises(ConfigFileError, match=words):
        Stage.of("nvlink", num_workers, num_gpus)


def test_on_a_cpu_nothing_is_moved() -> None:
    enter(torch.device("cpu"))
    stream = stream_of(torch.device("cpu"))
    assert isinstance(stream, CpuStream)
    stream.enter()
    first, second, counts = torch.randn(3, 4), torch.randn(2, 4), torch.tensor([2, 1], dtype=torch.int32)
    with stream.running():
        (alone, joined) = stream.copy_in([[first], [first, second]])
        stream.mark()
        stream.mark()
        stream.copy_out(joined, counts)
    result = stream.wait()
    assert alone is first
    assert torch.equal(joined, torch.cat([first, second]))
    assert result.z is joined
    assert result.rows_per_expert is counts
    assert len(result.phases_ns) == 3
    assert min(result.phases_ns) >= 0


def test_a_steps_record_outlives_the_next_step() -> None:
    """Counts of a CPU's step may lie in memory that dispatch uses again; telemetry reads the record later."""
    group = StoreGroup(dist.HashStore(), 0, 1)
    config = MoEConfig(group=group, num_experts=4, hidden_size=64, topk=2, max_tokens_per_rank=8, transport="cpu",
        layout=Layout.GROUPED, output_dtype=torch.float32, exact_shapes=False, overflow=Overflow.DROP)  # fmt: skip
    with MoECommunicator(config) as comm:
        stepper = Stepper(comm, Echo(), CpuStream())  # type: ignore[arg-type]
        for tokens in (3, 8, 5):
            ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).int()
            work = Work(0, 0, torch.randn(tokens, 64).bfloat16(), ids, torch.rand(tokens, 2), 1 << 62, 0, print)
            batch = stepper.step(0, 8, [Slice(work, 0, tokens)])
            record = stepper.record_of(batch)
            batch.rows_per_expert.zero_()  # as a later dispatch might
            expected = ids.flatten().bincount(minlength=4).int()
            assert record.rows_per_expert == expected.numpy().tobytes()
            assert record.remote_rows(record.topk_ids) == 0


def test_a_slots_tensors_are_checked_once_where_slots_and_experts_have_equal_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a group with a control plane, which always has a table of slots; another table moves ids elsewhere."""
    checked, step_inputs = list[int](), MoECommunicator.step_inputs

    def counted(comm: MoECommunicator, x: torch.Tensor, *routing: torch.Tensor) -> Any:
        checked.append(len(x))
        return step_inputs(comm, x, *routing)

    monkeypatch.setattr(MoECommunicator, "step_inputs", counted)
    config = MoEConfig(group=StoreGroup(dist.HashStore(), 0, 1), num_experts=4, hidden_size=64, topk=2,
        max_tokens_per_rank=8, transport="cpu", layout=Layout.GROUPED, output_dtype=torch.float32)  # fmt: skip
    slot = RequestSlot(3, 64, 2, torch.bfloat16)
    for row, expected in (((0, 1, 2, 3), [0, 3]), ((1, 0, 2, 3), [0, 3, 3])):
        with MoECommunicator(config) as comm, torch.no_grad():
            checked.clear()
            tables: Any = SimpleNamespace(route=lambda _, row=row: SlotMap(row, 4))
            stepper = Stepper(comm, Echo(), CpuStream(), tables)  # type: ignore[arg-type]
            for _ in range(2):
                x = torch.randn(3, 64).bfloat16()
                slot.x.copy_(x)
                slot.ids.copy_(torch.tensor([[0, 1], [2, 3], [1, 3]]))
                slot.weights.fill_(0.5)
                work = Work(0, 0, slot.x, slot.ids, slot.weights, 1 << 62, 0, print, y=slot.x, kept=slot.kept)
                assert torch.equal(stepper.step(0, 8, [Slice(work, 0, 3)]).z, x)
            assert checked == expected


class Echo:
    """Experts that return their rows."""

    output_dtype = torch.float32

    def forward(self, layer: int, tokens: torch.Tensor, *args: Any, out: torch.Tensor | None, num_rows: int) -> Any:
        return tokens.float() if out is None else out.copy_(tokens)


class Counting(LonelyGroup):
    """A group of one that notes how often it was asked to gather; the control plane's gathers once in an epoch."""

    asked: ClassVar[int] = 0

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        Counting.asked += 1
        return super().all_gather(payload, timeout_s)


def small_checkpoint() -> Any:
    spec = SimpleNamespace(dtype=torch.bfloat16, hidden_size=64, topk=2, num_experts=4)
    return SimpleNamespace(spec=spec)


@pytest.mark.parametrize(("configured", "expected"), [(None, 128), (7, 7), (0, 0)])
def test_the_crossover_of_a_worker_is_its_own_or_built_in(
    configured: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counting, "asked", 0)
    monkeypatch.setattr("ep_kernels.tuning.recall", lambda *args: pytest.fail("a worker looks for no record"))
    group: Any = Counting()
    with Model(WorkerConfig(model="m", ll_max_tokens=configured), small_checkpoint()).connect(group, 4) as comm:
        assert comm.ll_max_tokens == expected
    assert Counting.asked == 1
    with pytest.raises(ConfigFileError, match="ll_max_tokens"):
        load(WorkerConfig, None, ["model=m", "ll_max_tokens=-1"])


def test_the_order_of_sums_reaches_the_group_and_must_be_equal() -> None:
    orders, prints = ("rank", "domain"), []
    for order in orders:
        config = load(WorkerConfig, None, ["model=m", f"combine_order={order}"])
        with Model(config, small_checkpoint()).connect(LonelyGroup(), 4) as comm:
            assert comm.config.combine_order is CombineOrder(order)
            prints.append(fingerprint(comm.config))
    assert {name for name in prints[0] if prints[0][name] != prints[1][name]} == {"combine_order"}
    assert WorkerConfig(model="m").combine_order == CombineOrder.RANK.value
    with pytest.raises(ConfigFileError, match="combine_order"):
        load(WorkerConfig, None, ["model=m", "combine_order=host"])
    with Model(WorkerConfig(model="m", two_hop_tokens=9), small_checkpoint()).connect(LonelyGroup(), 4) as comm:
        assert comm.config.two_hop_tokens == 9
    with pytest.raises(ConfigFileError, match="two_hop_tokens"):
        load(WorkerConfig, None, ["model=m", "two_hop_tokens=-1"])


def test_limits_of_multiprocessors_reach_the_communicator() -> None:
    config = load(WorkerConfig, None, ["model=m", "dispatch_sms=24", "combine_sms=16"])
    with Model(config, small_checkpoint()).connect(LonelyGroup(), 4) as comm:
        assert (comm.config.resolved_dispatch_sms, comm.config.resolved_combine_sms) == (24, 16)
    with pytest.raises(ConfigFileError, match="combine_sms"):
        load(WorkerConfig, None, ["model=m", "combine_sms=0"])


def test_experts_are_held_wider_only_where_that_can_be_computed() -> None:
    made_models = [made(WorkerConfig(model="m", expert_dtype=name)) for name in ("", "bfloat16", "float32")]
    assert [model._held_dtype for model in made_models] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert [model._widen for model in made_models] == [False, True, True]
    with pytest.raises(CheckpointError, match=r"expert_dtype: expected .*bfloat16, or .*float32 on cpu, got"):
        made(WorkerConfig(model="m", expert_dtype="float16"))


class Pair:
    """Rank 0 of two; the other one has another configuration."""

    rank, size, epoch = 0, 2, 3

    other: MoEConfig

    def all_gather(self, payload: bytes, timeout_s: float) -> Sequence[bytes]:
        hello = msgspec.msgpack.decode(payload, type=Hello)
        return [payload, msgspec.msgpack.encode(msgspec.structs.replace(hello, fields=fingerprint(self.other)))]


def made(config: WorkerConfig) -> Model:
    spec = SimpleNamespace(dtype=torch.bfloat16, hidden_size=64, topk=2, num_experts=4)
    return Model(config, SimpleNamespace(spec=spec))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"max_tokens_per_step": 64}, "max_tokens_per_rank"),
        ({"dtype": "float16"}, "dtype"),
        ({"combine_dtype": "bfloat16"}, "combine_dtype"),
        ({"step_timeout_s": 3.0}, "timeout_s"),
        ({"ll_max_tokens": 9}, "ll_max_tokens"),
    ],
)
def test_what_bring_up_would_refuse_is_in_the_registration(change: dict[str, Any], name: str) -> None:
    """The same names and values, so that a worker with another configuration is refused before it has a rank."""
    one, other = made(WorkerConfig(model="m")), made(WorkerConfig(model="m", **change))
    group: Any = Pair()
    group.other = other._communicator_config(group, 4)
    with pytest.raises(ConfigError, match=f"^{name}: expected"):
        one.connect(group, 4)
    mine, others = one.communicator_settings(), other.communicator_settings()
    assert next(field for field in mine if mine[field] != others[field]) == name
    assert fingerprint(group.other) == {**others, "num_experts": "4", "expert_map": ANY}


def test_the_peak_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU copies between a tenth of a GB and a TB per second; a GPU has the active links of its own."""
    assert 1e8 < peak_bytes_per_s(torch.device("cpu")) < 1e12
    gpus = [SimpleNamespace(uuid=f"GPU-{name}", nvlink_gbps=rate) for name, rate in (("a", 450.0), ("b", 100.0))]
    monkeypatch.setattr(device_module, "probe", lambda: SimpleNamespace(gpus=gpus))
    for name, expected in (("GPU-a", 450e9), ("GPU-c", 0.0)):
        monkeypatch.setattr(device_module, "uuid_of", lambda _, name=name: name)
        assert peak_bytes_per_s(torch.device("cuda", 0)) == expected
