"""All parts together, as emitted code uses them: an fx graph with axes, gathered weights, dropout and DTensor parameters."""

import copy
import operator
import time

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from autopar.ir.layout import I, Layout, shard, split
from autopar.ir.mesh import Mesh
from autopar.runtime import collectives
from autopar.runtime.bucketed_collectives import PAIRS
from autopar.runtime.random import RngState, seeded
from autopar.runtime.recorder import Issued, recorded
from autopar.runtime.rematerialize.manager import Rematerializer
from autopar.runtime.storage import full_tensor, store, to_local
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import Context, connect

BATCH, WIDTH, HIDDEN = 8, 4, 16
LAYOUTS: dict[str, Layout] = {  # fsdp on dp, Megatron's pair on tp
    "up": (split(1, 2), split(0, 4)),
    "bias": (I, split(0, 4)),
    "down": (split(0, 2), split(1, 4)),
}


def weights() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes = {"up": (HIDDEN, WIDTH), "bias": (HIDDEN,), "down": (WIDTH, HIDDEN)}
    return {name: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for name, shape in shapes.items()}


def sequential(parameters: dict[str, nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, parameters["up"], parameters["bias"]).relu(), parameters["down"]).square().sum()


def gathered(graph: fx.Graph, rematerializer: fx.Node, weight: fx.Node, axis: fx.Node, dim: int) -> fx.Node:
    start, wait = PAIRS["all_gather__reduce_scatter"]
    pending = graph.call_function(start, ([weight], axis))
    found = graph.call_function(wait, (pending, axis, [(dim,)], rematerializer))
    return graph.call_function(operator.getitem, (found, 0))


def emitted(context: Context) -> fx.GraphModule:
    root = nn.Module()
    for name, parameter in store(weights(), LAYOUTS, context).items():
        root.register_parameter(name, parameter)  # type: ignore[arg-type]
    root.mesh_dp, root.mesh_tp = context.axes  # type: ignore[assignment]
    root.rematerializer, root.rng_state = Rematerializer(), RngState(0)  # type: ignore[assignment]
    graph = fx.Graph()
    x = graph.placeholder("x")
    dp, tp, rematerializer, rng_state = (
        graph.create_node("get_attr", name) for name in ("mesh_dp", "mesh_tp", "rematerializer", "rng_state")
    )
    training = graph.create_node("get_attr", "training")
    x = graph.call_function(collectives.slice__all_gather, (x, dp, 0))
    x = graph.call_function(collectives.identity__all_reduce, (x, tp))
    up, bias, down = (graph.call_function(to_local, (graph.create_node("get_attr", name),)) for name in ("up", "bias", "down"))
    up = gathered(graph, rematerializer, up, dp, 1)
    bias = graph.call_function(collectives.identity__all_reduce, (bias, dp))
    x = graph.call_function(torch.ops.aten.linear.default, (x, up, bias))
    x = graph.call_function(torch.ops.aten.relu.default, (x,))
    x = graph.call_function(seeded, (torch.ops.aten.dropout.default, rng_state, 0, [dp, tp], x, 0.0, training))
    down = gathered(graph, rematerializer, down, dp, 0)
    x = graph.call_function(torch.ops.aten.linear.default, (x, down))
    x = graph.call_function(collectives.all_reduce__identity, (x, tp))
    x = graph.call_function(torch.ops.aten.square.default, (x,))
    x = graph.call_function(torch.ops.aten.sum.default, (x,))
    graph.output(graph.call_function(collectives.all_reduce__identity, (x, dp)))
    return fx.GraphModule(root, graph)


def freed(rematerializer: Rematerializer) -> bool:
    """Whether nothing is left in a moment: a thread of gloo may hold what it has gathered a little longer."""
    end = time.monotonic() + 10
    while rematerializer.tracked and time.monotonic() < end:
        time.sleep(0.01)
    return not rematerializer.tracked


def step(_: None) -> tuple[str, list[Issued]]:
    context = connect(Mesh.of({"dp": 2, "tp": 4}))
    module, plain = emitted(context), weights()
    x = torch.linspace(-1, 1, BATCH * WIDTH, dtype=torch.float64).reshape(BATCH, WIDTH)
    sequential(plain, x).backward()
    for parallel in (module, copy.deepcopy(module)):
        parallel.zero_grad()
        with recorded(context.known_axes) as log:
            with parallel.rematerializer.active():  # type: ignore[operator, union-attr]
                loss = parallel(x)
                assert freed(parallel.rematerializer), "gathered memory is free after the forward"  # type: ignore[arg-type]
            loss.backward()
        torch.testing.assert_close(loss, sequential(plain, x))
        for name, parameter in parallel.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(full_tensor(parameter.grad), plain[name].grad)
    mine = shard(plain["up"].detach(), LAYOUTS["up"], (2, 4), context.coordinates)
    torch.testing.assert_close(module.up.to_local(), mine)  # type: ignore[operator, union-attr]
    return module.code, log


def test_an_emitted_module_computes_the_sequential_numbers_and_issues_what_it_says(pool: WorkerPool) -> None:
    results = pool.run(f"{__name__}:step")
    code, log = results[0]  # type: ignore[misc]
    assert all(result == results[0] for result in results)
    assert "autopar_runtime_collectives_slice__all_gather(x, mesh_dp, 0)" in code
    activations, up = BATCH // 2 * WIDTH * 8, HIDDEN // 4 * WIDTH * 8
    gather, scatter = {"kind": "all_gather", "axis": "dp"}, {"kind": "reduce_scatter", "axis": "dp"}
    assert log == [
        Issued(**gather, bytes=up, where="forward"),
        Issued(**gather, bytes=up, where="forward"),
        Issued(kind="all_reduce", axis="tp", bytes=activations, where="forward"),
        Issued(kind="all_reduce", axis="dp", bytes=8, where="forward"),
        Issued(**gather, bytes=up, where="backward"),
        Issued(**scatter, bytes=up, where="backward"),
        Issued(kind="all_reduce", axis="dp", bytes=HIDDEN // 4 * 8, where="backward"),
        Issued(**scatter, bytes=up, where="backward"),
    ]


def compiled(_: None) -> None:
    """Collectives trace without a break: the graph is whole, and its numbers are those of the eager one."""
    context = connect(Mesh.of(2))
    (axis,) = context.axes

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        w = collectives.all_gather__reduce_scatter(w, axis, 1, 2)
        x = collectives.all_to_all__all_to_all(x, axis, 0, 1)
        return collectives.all_reduce__identity(F.linear(x.transpose(0, 1), w.t()).tanh().sum(), axis)

    x = torch.randn(4, 8, requires_grad=True)
    w = torch.randn(8, 4, requires_grad=True)
    found, expected = [], []
    for function, results in ((layer, expected), (torch.compile(layer, fullgraph=True, backend="aot_eager"), found)):
        y = function(x, w)
        results += [y, *torch.autograd.grad(y, (x, w))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.thorough
def test_torch_compile_sees_through_the_collectives(pool: WorkerPool) -> None:
    pool.run(f"{__name__}:compiled", ranks=2)
