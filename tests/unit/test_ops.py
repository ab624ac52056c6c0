"""Compiled functions on the cpu transport: bits, order, lifetimes, errors, gradients; and what opcheck says."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from ep_kernels import MoECommunicator, autograd, ops
from ep_kernels.errors import ArgumentError, CapacityError, ClosedError, HandleError
from ep_kernels.routing import delivered
from ep_kernels.transports.base import CombineArgs, DispatchArgs
from ep_kernels.types import DispatchHandle, DispatchOutput, Layout, Mode, ScaleFormat
from tests.cases import RoutingCase, draw_seed
from tests.compare import expert, packed_layout, same_bits, same_dispatch
from tests.compiled import How, compiled_gradients, compiled_layers, gained
from tests.groups import LonelyGroup
from tests.transports.steps import Inputs, check_combine, check_dispatch, next_case, run_story
from tests.worlds import World

BACKENDS = ("eager", "aot_eager", "inductor")

pytestmark = pytest.mark.filterwarnings("error:crossdock.*may not alias")
"""The compiler warns of an operator whose outputs alias, at the first call of a graph."""


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


@pytest.fixture
def case() -> RoutingCase:
    return RoutingCase(7, 3, 48, (6,), "uniform", draw_seed(), max_tokens=8)


@pytest.fixture
def make(case: RoutingCase) -> Iterator[Callable[..., MoECommunicator]]:
    """A communicator of one rank."""
    made: list[MoECommunicator] = []

    def of(**overrides: Any) -> MoECommunicator:
        made.append(MoECommunicator(case.config(LonelyGroup(), **({"mode": Mode.HT, "timeout_s": 10.0} | overrides))))
        return made[-1]

    yield of
    for comm in made:
        comm.close()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    pool = World(2)
    yield pool
    pool.close()


def arguments(comm: MoECommunicator, case: RoutingCase) -> tuple[Any, torch.Tensor, torch.Tensor]:
    return Inputs.of(case, comm.config).arguments(0, "cpu")


def operations(comm: MoECommunicator, monkeypatch: pytest.MonkeyPatch) -> list[DispatchArgs | CombineArgs]:
    """What the transport is asked for from now on."""
    calls: list[DispatchArgs | CombineArgs] = []
    for name in ("dispatch", "combine"):
        real = getattr(comm._transport, name)

        def note(args: Any, real: Callable[[Any], Any] = real) -> Any:
            calls.append(args)
            return real(args)

        monkeypatch.setattr(comm._transport, name, note)
    return calls


def compiled(function: Callable[..., Any], backend: str = "aot_eager") -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, backend=backend)


COMPILED = [
    ("eager", 1, Layout.FLAT),
    *(("aot_eager", in_flight, layout) for in_flight in (1, 2) for layout in Layout),
    *(("inductor", 1, layout) for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR)),
]
"""Each backend does what the one before it does, and more. What inductor makes of FLAT, test_worst_case_shapes shows;
of GROUPED, test_several_ranks."""


@pytest.mark.parametrize(("backend", "max_in_flight", "layout"), COMPILED)
def test_three_layers(
    make: Callable[..., MoECommunicator], case: RoutingCase, layout: Layout, backend: str, max_in_flight: int
) -> None:
    comm = make(layout=layout, max_in_flight=max_in_flight)
    compiled_layers(comm, case, How(backend=backend, dynamic=backend != "inductor", calls=2))


@pytest.mark.parametrize(("layout", "recompiles"), [(Layout.GROUPED, 8), (Layout.GROUPED, 1), (Layout.EXPERT_MAJOR, 1)])
def test_graph_breaks(make: Callable[..., MoECommunicator], case: RoutingCase, layout: Layout, recompiles: int) -> None:
    """`torch.compile(model)` as most people write it: exact shapes end the graph at each dispatch, and what has been
    compiled too often runs eagerly, in the midst of a function that the compiler has begun to trace."""
    comm, how = make(layout=layout, dtype=torch.float32), How(backend="aot_eager", fullgraph=False, calls=2)
    with torch._dynamo.config.patch(recompile_limit=recompiles):
        compiled_layers(comm, case, how)
        compiled_gradients(comm, case, how)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [(Layout.FLAT, "eager"), (Layout.FLAT, "aot_eager"), (Layout.EXPERT_MAJOR, "aot_eager"), (Layout.FLAT, "inductor")],
)
def test_layers_that_are_compiled_one_by_one_train(
    make: Callable[..., MoECommunicator], case: RoutingCase, layout: Layout, backend: str
) -> None:
    """Each block of a model is often compiled by itself: all forward passes come before the first backward pass."""
    comm = make(layout=layout, dtype=torch.float32)
    _, ids, weights = arguments(comm, case)

    def layer(x: torch.Tensor) -> torch.Tensor:
        out, handle = autograd.dispatch(comm, x, ids, weights)
        return autograd.combine(comm, out.tokens * 0.5, handle, out.topk_weights)

    gradients, run = [], compiled(layer, backend)
    x = torch.randn(arguments(comm, case)[0].shape)
    for function in (layer, run, run):
        leaf = x.clone().requires_grad_()
        function(function(function(leaf))).square().sum().backward()
        gradients.append(leaf.grad)
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.filterwarnings("error:.*autograd kernel was not registered")
def test_plain_calls_cut_the_graph(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    """As eager ones do: what they give needs no gradient, and what is computed of it has the same."""
    comm = make(layout=Layout.EXPERT_MAJOR, dtype=torch.float32)
    x, ids, weights = arguments(comm, case)
    given, gate = x.clone().requires_grad_(), weights.clone().requires_grad_()
    gain = torch.ones(x.shape[1], requires_grad=True)

    def layer(x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, handle = comm.dispatch(x, ids, gate)
        y = torch.where(delivered(out)[..., None], out.tokens, 0) * gain
        return y.square().sum(), comm.combine(y, handle)

    gradients = []
    for function in (layer, compiled(layer)):
        loss, z = function(given, gate)
        assert not z.requires_grad
        gradients.append(torch.autograd.grad(loss, gain)[0])
    same_bits(*gradients, "gradient of what is computed of the rows")


@pytest.mark.parametrize(
    ("backend", "layout"), [("aot_eager", Layout.GROUPED), ("aot_eager", Layout.FLAT), ("inductor", Layout.FLAT)]
)
def test_worst_case_shapes(
    make: Callable[..., MoECommunicator], case: RoutingCase, layout: Layout, backend: str
) -> None:
    comm = make(layout=layout, exact_shapes=False, max_recv_rows=32)
    compiled_layers(comm, case, How(backend=backend, calls=2))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "backend"), [(Layout.GROUPED, "inductor"), (Layout.RANK_MAJOR, "aot_eager")])
def test_several_ranks(world: World, layout: Layout, backend: str) -> None:
    case = RoutingCase(7, 3, 48, (5, 7), "uniform", draw_seed(), max_tokens=8)
    story = partial(compiled_layers, how=How(backend=backend, dynamic=True, calls=3))
    overrides = {"mode": Mode.HT, "layout": layout, "timeout_s": 60.0}
    world.run(run_story, "cpu", story, case, overrides, timeout_s=240)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.FLAT])
def test_several_ranks_train(world: World, layout: Layout) -> None:
    case = RoutingCase(7, 3, 48, (5, 7), "uniform", draw_seed(), max_tokens=8)
    story = partial(compiled_gradients, how=How(backend="aot_eager", calls=2))
    overrides = {"mode": Mode.HT, "layout": layout, "dtype": torch.float32, "timeout_s": 60.0}
    world.run(run_story, "cpu", story, case, overrides, timeout_s=240)


TRAINED = [
    *(("aot_eager", layout) for layout in Layout),
    ("inductor", Layout.EXPERT_MAJOR),
]
"""What inductor makes of other layouts, COMPILED shows; what of their gradients, aot_eager."""


@pytest.mark.parametrize(("backend", "layout"), TRAINED)
def test_training_step(make: Callable[..., MoECommunicator], case: RoutingCase, layout: Layout, backend: str) -> None:
    comm = make(layout=layout, dtype=torch.float32)
    compiled_gradients(comm, case, How(backend=backend, calls=2))


@pytest.mark.parametrize(
    "overrides",
    [
        {"quantize": True},
        {"quantize": True, "scale_format": ScaleFormat.UE8M0},
        {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED},
        {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED, "layout": Layout.EXPERT_MAJOR},
        {"quantize": True, "scale_format": ScaleFormat.UE8M0_PACKED, "layout": Layout.RANK_MAJOR},
        {"dtype": torch.uint8, "scale_columns": 3, "scale_dtype": torch.int32},
        {"layout": Layout.GROUPED, "exact_combine": True},
        {"mode": Mode.AUTO, "ll_max_tokens": 4, "layout": Layout.GROUPED, "expert_alignment": 4},
    ],
)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_is_handed_out(
    make: Callable[..., MoECommunicator], case: RoutingCase, overrides: dict[str, Any], backend: str
) -> None:
    """Every output is the reference's, and the handle serves eager code."""
    comm = make(**overrides)
    dispatch = compiled(comm.dispatch, backend)
    kept: list[tuple[Inputs, DispatchOutput, DispatchHandle]] = []
    for number in range(2):
        inputs = Inputs.of(next_case(case, number), comm.config)
        kept.append((inputs, *dispatch(*inputs.arguments(0, "cpu"))))
    for inputs, out, handle in kept:
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
        if comm.config.scale_format is ScaleFormat.UE8M0_PACKED:
            assert out.scales is not None
            packed_layout(out.scales)
        assert not comm.is_current(handle)
        with pytest.raises(HandleError, match="recycled"):
            comm.combine_input(handle)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_dropped_merged_or_moved(
    make: Callable[..., MoECommunicator], case: RoutingCase, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal dispatches run twice, unused results too, in the order of the program."""
    comm = make(layout=Layout.RANK_MAJOR)
    x, ids, weights = arguments(comm, case)

    def step(x: torch.Tensor) -> torch.Tensor:
        first, a = comm.dispatch(x, ids, weights)
        second, b = comm.dispatch(x, ids, weights)
        comm.combine(gained(second, x.dtype), b)
        comm.dispatch(x + 1, ids, weights)
        comm.combine(gained(first, x.dtype), a)
        return x * 2

    run = compiled(step, backend)
    run(x)
    calls = operations(comm, monkeypatch)
    same_bits(run(x), x * 2, "result")
    kinds = [type(call) for call in calls]
    assert kinds == [DispatchArgs, DispatchArgs, CombineArgs, DispatchArgs, CombineArgs]
    payloads = [call.x for call in calls if isinstance(call, DispatchArgs)]
    for got, want in zip(payloads, (x, x, x + 1), strict=True):
        same_bits(got, want, "payload")


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backward_runs_each_operation_once(
    make: Callable[..., MoECommunicator], case: RoutingCase, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers side by side, which only the order tensor orders: nothing is computed again or left out."""
    comm = make(layout=Layout.EXPERT_MAJOR)
    x, ids, weights = arguments(comm, case)
    x = x.nan_to_num(0.5, 1.0, -1.0).requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for _ in range(2):
            out, handle = autograd.dispatch(comm, x, ids, weights)
            total = total + autograd.combine(comm, out.tokens * 2, handle, out.topk_weights).float().square().sum()
        return total

    compiled(loss, backend)(x).backward()
    calls = operations(comm, monkeypatch)
    compiled(loss, backend)(x).backward()
    forward, backward = [type(call) for call in calls[:4]], [type(call) for call in calls[4:]]
    assert forward == [DispatchArgs, CombineArgs] * 2
    assert backward == [DispatchArgs, CombineArgs] * 2
    assert all(call.previous is not None for call in calls[4:] if isinstance(call, DispatchArgs))


def test_a_routing_used_again(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    """`previous_handle` from the same graph, from another graph and from eager code."""
    comm = make(layout=Layout.GROUPED)
    inputs = Inputs.of(case, comm.config)
    x, ids, weights = inputs.arguments(0, "cpu")

    def again(x: torch.Tensor, handle: DispatchHandle) -> tuple[DispatchOutput, DispatchHandle]:
        return comm.dispatch(x, None, None, previous_handle=handle)

    def both(x: torch.Tensor) -> tuple[DispatchOutput, DispatchHandle]:
        return again(x, comm.dispatch(x, ids, weights)[1])

    _, eager = comm.dispatch(x, ids, weights)
    made = compiled(both)(x)
    for out, handle in (made, compiled(again)(x, made[1]), compiled(again)(x, eager), again(x, made[1])):
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)


def test_requests_and_buffers(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    """What else a layer may call: async forms, input buffers, row weights, `out`."""
    comm = make(layout=Layout.EXPERT_MAJOR)
    inputs = Inputs.of(case, comm.config)
    x, ids, weights = inputs.arguments(0, "cpu")

    def step(x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held = comm.dispatch_input(x.shape[0]).copy_(x)
        out, handle = comm.dispatch_async(held, ids, weights).wait()
        rows = comm.row_weights(handle)
        y = comm.combine_input(handle).copy_(expert(out, torch.bfloat16))
        request = comm.combine_async(y, handle, row_weights=rows, apply_weights=False)
        return comm.combine(y, handle, out=z), request.wait(), request.weights

    z = torch.zeros_like(x)
    got = compiled(step)(x, z)
    assert got[0] is z
    for a, b in zip(got, step(x, torch.zeros_like(x)), strict=True):
        same_bits(a, b, "result")


BAD_OUT: dict[str, Callable[[torch.Tensor], Any]] = {
    "of whole numbers": torch.Tensor.int,
    "wider": torch.Tensor.double,
    "of other tokens": lambda z: z[1:],
    "that rows would be repeated in": lambda z: z.expand(3, *z.shape).contiguous(),
    "with gaps": lambda z: z.repeat(1, 2)[:, ::2],
    "of no memory": lambda z: z.to("meta"),
    "a list": lambda z: [z],
}


@pytest.mark.parametrize("bad", BAD_OUT)
def test_an_out_that_eager_code_refuses_is_refused(
    make: Callable[..., MoECommunicator], case: RoutingCase, bad: str
) -> None:
    comm = make(layout=Layout.EXPERT_MAJOR)
    x, ids, weights = arguments(comm, case)
    out, handle = comm.dispatch(x, ids, weights)
    y, z = expert(out, torch.bfloat16), BAD_OUT[bad](torch.zeros_like(x))
    calls: list[Callable[[Any], Any]] = [
        lambda z: comm.combine(y, handle, out=z),
        lambda z: comm.combine_async(y, handle, out=z).wait(),
    ]
    for call in calls:
        for run in (call, torch.compile(call, backend="eager")):
            with pytest.raises(ArgumentError, match=r"^out: expected"):
                run(z)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"ArgumentError\('out: expected"):
        compiled(calls[0])(z)
    assert not [sample for sample in comm.samples() if sample.op == "combine"], "nothing was sent"


def test_an_out_in_y_has_the_result_in_compiled_code(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    """Eager code refuses it, since z is written while y is read; here it is copied."""
    comm = make(layout=Layout.RANK_MAJOR, dtype=torch.float32)
    x, ids, weights = arguments(comm, case)
    out, handle = comm.dispatch(x, ids, weights)
    y = torch.rand_like(out.tokens)
    expected, inside = comm.combine(y, handle), y.view(-1, y.shape[-1])[1 : len(x) + 1]
    run = torch.compile(lambda y, z: comm.combine(y, handle, out=z), backend="aot_eager")
    same_bits(run(y, inside), expected, "z")
    same_bits(inside, expected, "out")


def test_no_communicator_is_kept(case: RoutingCase) -> None:
    """Neither by compiled code nor by the operators; one that is gone or closed says so."""
    comm = MoECommunicator(case.config(LonelyGroup(), mode=Mode.HT, timeout_s=10.0))
    x, ids, weights = arguments(comm, case)

    def step(comm: MoECommunicator, x: torch.Tensor) -> torch.Tensor:
        out, handle = comm.dispatch(x, ids, weights)
        return comm.combine(gained(out, x.dtype), handle)

    run = compiled(step)
    run(comm, x)
    _, handle = comm.dispatch(x, ids, weights)
    comm.close()
    with pytest.raises(ClosedError, match="the communicator is closed"):
        run(comm, x)
    name, watch, order = comm._site.comm, weakref.ref(comm), comm._site.order
    former = ops.carried(handle)
    del comm, handle
    gc.collect()
    assert watch() is None
    with pytest.raises(ClosedError, match="no longer exists"):
        torch.ops.crossdock.combine(order, name, x, *former, None, True)


def test_one_function_many_communicators(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    """Compiled code is of one communicator; another gets code of its own."""

    def step(comm: MoECommunicator, *args: torch.Tensor) -> tuple[DispatchOutput, DispatchHandle]:
        return comm.dispatch(*args)

    run = compiled(step)
    comms = [make(layout=layout) for layout in (Layout.FLAT, Layout.FLAT, Layout.RANK_MAJOR)]
    for comm in comms * 2:
        inputs = Inputs.of(case, comm.config)
        out, handle = run(comm, *inputs.arguments(0, "cpu"))
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)
    with pytest.raises(HandleError, match="another communicator"):
        compiled(comms[1].combine)(torch.zeros_like(out.tokens), handle)


def test_errors_are_ours(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    comm = make(layout=Layout.GROUPED, max_recv_rows=4)
    x, ids, weights = arguments(comm, case)
    dispatch = compiled(comm.dispatch)
    with pytest.raises(CapacityError, match="rows past the receive capacity"):
        dispatch(x, ids, weights)
    with pytest.raises(ArgumentError, match=r"^x: expected torch\.bfloat16"):
        dispatch(x.float(), ids, weights)
    with pytest.raises(ArgumentError, match=r"^topk_ids: expected a torch\.Tensor"):
        dispatch(x, None, weights)
    with pytest.raises(ArgumentError, match=r"^x: expected at most max_tokens_per_rank = 8 rows"):
        dispatch(x.repeat(9, 1), ids.repeat(9, 1), weights.repeat(9, 1))


def test_handles_of_an_old_epoch(make: Callable[..., MoECommunicator], case: RoutingCase) -> None:
    """Compiled code goes on in the new epoch and refuses handles of the old one."""
    comm = make(layout=Layout.RANK_MAJOR)
    inputs = Inputs.of(case, comm.config)
    args = inputs.arguments(0, "cpu")
    dispatch, combine = compiled(comm.dispatch), compiled(comm.combine)
    for epoch in (1, 2, 3):
        out, old = dispatch(*args)
        comm.set_active([True], epoch)
        with pytest.raises(HandleError, match=f"made in epoch {epoch - 1}, the group is in epoch {epoch}"):
            combine(expert(out, torch.bfloat16), old)
        out, handle = dispatch(*args)
        check_combine(comm, check_dispatch(comm, inputs, out), out, handle)


@pytest.mark.parametrize("layout", list(Layout))
def test_opcheck(make: Callable[..., MoECommunicator], case: RoutingCase, layout: Layout) -> None:
    """Each output is memory of its own, of the shape, strides and dtype that were foretold."""
    comm = make(layout=layout)
    inputs = Inputs.of(case, comm.config)
    x, ids, weights = inputs.arguments(0, "cpu")
    order, name = comm._site.order, comm._site.comm
    out, handle = comm.dispatch(x, ids, weights)
    same_dispatch(out, check_dispatch(comm, inputs, out).outputs[0])
    former = ops.carried(handle)
    y = expert(out, torch.bfloat16).nan_to_num()
    checks: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.crossdock.dispatch, (order, name, x, None, ids, weights, None, *ops.FRESH)),
        (torch.ops.crossdock.dispatch, (order, name, x, None, ids, weights, 8, *former)),
        (torch.ops.crossdock.combine, (order, name, y, *former, None, True)),
    ]
    if layout.per_expert:
        checks.append((torch.ops.crossdock.combine, (order, name, y, *former, comm.row_weights(handle), False)))
        torch.library.opcheck(torch.ops.crossdock.row_weights.default, (name, *former))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")  # values differ: sequence numbers, stamps
    for op, args in checks:
        torch.library.opcheck(op.default, args, test_utils=tests)
