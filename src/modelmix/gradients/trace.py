"""Trace a model's pass with fake tensors and a symbolic number of samples, and make its graph one for all numbers.

No private value is looked at, and no Python of the model runs when the graph does: counters, the clock or the size of a
batch cannot change what is computed.
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.modules import transformer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from modelmix.errors import ModelMixError
from modelmix.gradients import hooks
from modelmix.gradients.batch import Batch, Loss
from modelmix.gradients.dataflow import ALL, MeetingError
from modelmix.gradients.layers import LayerCall

HINTS = ((7, 5, 3, 11, 13, 17, 19), (67, 71, 73, 79, 83))
"""Numbers of samples that the two traces are made with; the first of each that is no size of a tensor at hand."""
_FEW = 16  # rows; torch asks whether a convolution has fewer, so the first trace should and the second should not

_SMALL = 4096  # entries of a constant that are compared
_ZEROED: dict[Any, Any] = {
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
}


@dataclass
class Trace:
    """Hold one trace, and what its outputs are.

    Args:
        module: of parameters, inputs and targets, flat; gives tensors of the model's outputs, losses, what layers saw.
        samples: the symbol m; hint: what it stood for while tracing.
        shapes: what tracing has supposed about m.
        form: of the model's outputs.
        leaves: of the outputs; None for a tensor.
        calls: of layers, without what was seen, and how many tensors that is.
    """

    module: fx.GraphModule
    samples: Any
    shapes: ShapeEnv
    hint: int
    form: TreeSpec
    leaves: list[Any]
    calls: list[tuple[LayerCall, int]]


def trace_pass(model: nn.Module, loss: Loss, case: Any, copies: int, hints: tuple[int, ...]) -> Trace:
    flat, form = tree_flatten(case)
    count = len(case[0])
    taken = {size for t in (*flat, *model.buffers(), *model.parameters()) for size in t.shape}
    free = [h for h in hints if h not in taken and h * copies not in taken] or [hints[-1]]
    hint = next((h for h in free if h * copies < _FEW), free[0])
    symbol, shapes, fake = _fake(flat, count, copies, hint)
    kept: dict[str, Any] = {}

    def line(*flat: Tensor) -> list[Tensor]:
        parameters, inputs, targets = tree_unflatten(list(flat), form)
        done = hooks.observe(model, loss, parameters, Batch(inputs, targets, rows_per_sample=copies))
        leaves, kept["form"] = tree_flatten(done.outputs)
        kept["leaves"] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept["calls"] = [(replace(call, seen=()), len(call.seen)) for call in done.calls]
        seen = [t for call in done.calls for t in call.seen]
        return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), done.losses, *seen]

    with torch.no_grad(), _undisturbed(model):
        try:
            module = make_fx(line, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fake)
        except (ModelMixError, MeetingError):
            raise
        except Exception as error:  # whatever fake tensors cannot do: values that decide, shapes that depend on values
            raise MeetingError(f"it cannot be traced ({one_line(error)})") from error
    if not isinstance(module.graph, fx.Graph) or not kept:
        raise MeetingError("it cannot be traced")
    _normalise(module.graph)
    return Trace(module, symbol, shapes, hint, kept["form"], kept["leaves"], kept["calls"])


def _fake(flat: list[Tensor], count: int, copies: int, hint: int) -> tuple[Any, ShapeEnv, list[Tensor]]:
    """Make the symbol m, what is known of it, and tensors without values.

    All but the first ``count`` of these have m * copies rows.
    """
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    source = ConstantSource("samples")
    symbol = shapes.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    samples: Any = shapes.create_symintnode(symbol, hint=hint, source=source)
    with mode:
        rows = [torch.empty(samples * copies, *t.shape[1:], dtype=t.dtype, device=t.device) for t in flat[count:]]
    return symbol, shapes, [*(mode.from_tensor(t.detach(), static_shapes=True) for t in flat[:count]), *rows]


def generalise(one: Trace, other: Trace, case: Any, copies: int) -> None:
    """Make one graph of two that differ in sizes only, and trace that, so that its shapes are symbolic again.

    Some of torch's rules for ``vmap`` write the number of samples down as a plain number. Where it stands in both
    graphs, k times the one and k times the other, it becomes k times the number of samples. What this gives is proved
    like any other graph, and is what runs.
    """
    graph, nodes, others = one.module.graph, list(one.module.graph.nodes), list(other.module.graph.nodes)
    flat, _ = tree_flatten(case)
    places = {node: i for i, node in enumerate(others)}
    first = [n for n in nodes if n.op == "placeholder"]
    with graph.inserting_after(first[-1]):
        rows = graph.call_function(torch.ops.aten.sym_size.int, (first[len(case[0])], 0))
    with graph.inserting_after(rows):
        samples = graph.call_function(operator.floordiv, (rows, copies))
    sizes: dict[int, fx.Node] = {}

    def size(k: int) -> fx.Node:
        if k not in sizes:
            with graph.inserting_after(samples):
                sizes[k] = graph.call_function(operator.mul, (samples, k))
        return sizes[k]

    def both(a: Any, b: Any) -> Any:
        if isinstance(a, fx.Node) and isinstance(b, fx.Node) and nodes.index(a) == places[b]:
            return a
        if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
            return type(a)(both(x, y) for x, y in zip(a, b, strict=True))
        if type(a) is int and type(b) is int and a != b and a % one.hint == 0 and a * other.hint == b * one.hint:
            return size(a // one.hint)
        if type(a) is type(b) and a == b:
            return a
        raise MeetingError("the model branches on the batch size, or is not the same twice")

    if [(n.op, n.op == "get_attr" or n.target) for n in nodes] != [
        (n.op, n.op == "get_attr" or n.target) for n in others
    ]:
        raise MeetingError("the model branches on the batch size, or is not the same twice")
    for a, b in zip(nodes, others, strict=True):
        if a.op == "get_attr" and _constant(one.module, a) != _constant(other.module, b):
            raise MeetingError("the model is not the same twice")
        if a.op != "placeholder":
            a.args = both(a.args, b.args)
            a.kwargs = {k: both(v, b.kwargs.get(k)) for k, v in a.kwargs.items()}
    one.module.recompile()
    one.samples, one.shapes, fake = _fake(flat, len(case[0]), copies, one.hint)
    with torch.no_grad():
        try:
            one.module = make_fx(one.module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fake)
        except Exception as error:
            raise MeetingError(f"it cannot be traced ({one_line(error)})") from error
    _normalise(one.module.graph)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave no fake tensor behind in the model, and refuse randomness that a trace would freeze."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints a traceback for what is tried and refused here
    disabled, log.disabled = log.disabled, True
    drawn = _foreign_randomness()
    detect = transformer._detect_is_causal_mask
    # It looks at the values of a mask to choose a faster kernel; without values, the mask itself is used.
    transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: bool(is_causal)
    try:
        yield
        if _foreign_randomness() != drawn:
            raise MeetingError("the model draws random numbers that are not torch's")
    finally:
        transformer._detect_is_causal_mask, log.disabled = detect, disabled
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def _foreign_randomness() -> Any:
    """Return the state of Python's and numpy's generators, on which a model may draw behind torch's back."""
    numpy: Any = np.random.get_state()  # noqa: NPY002, whoever draws on the old one is to be noticed
    return random.getstate(), numpy[1].tobytes(), numpy[2]


def results_of(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return list(output.args[0])


def _normalise(graph: fx.Graph) -> None:
    """Drop slices that take everything and sizes that are known already: tracing records them now and then.

    Memory that is not initialised may hold what another sample left there: it becomes zeros.
    """
    sizes: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in _ZEROED:
            node.target = _ZEROED[node.target]
            if node.target is torch.ops.aten.zeros.default:
                node.kwargs = {name: value for name, value in node.kwargs.items() if name != "memory_format"}
        value, other = node.meta.get("val"), None
        if (node.target is torch.ops.aten.slice.Tensor and node.args[2:] in ((0, ALL), (0, ALL, 1))) or (
            node.target is torch.ops.aten.slice_backward.default and node.args[3:] == (0, ALL, 1)
        ):
            other = node.args[0]
        elif node.op == "call_function" and isinstance(value, torch.SymInt):
            other = sizes.setdefault(value.node.expr, node)
        if isinstance(other, fx.Node) and other is not node:
            node.replace_all_uses_with(other)
            graph.erase_node(node)
    graph.eliminate_dead_code()


def text_of(module: fx.GraphModule) -> str:
    """Return a text that is equal for traces of the same operations with the same constants."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        target = _constant(module, node) if node.op == "get_attr" else node.target
        lines.append(f"{node.op} {target} {arguments}")
        number[node] = len(number)
    return "\n".join(lines)


def rules_of(trace: Trace) -> list[Any]:
    """Say how every layer's gradients will be computed: for which parameters, and with how many rows of a sample."""
    return [(dict(call.names), getattr(call.rule, "keywords", None), count) for call, count in trace.calls]


def _constant(module: fx.GraphModule, node: fx.Node) -> Any:
    """Identify a constant: the model's own by its place, one that its code makes anew by its values."""
    constant = getattr(module, str(node.target))
    if not isinstance(constant, Tensor):
        return constant
    small = constant.numel() <= _SMALL and constant.layout == torch.strided and not constant.is_meta
    return constant.tolist() if small else (constant.data_ptr(), tuple(constant.shape))


def one_line(error: BaseException | None) -> str:
    """Return what an error says, in one line of at most 200 characters."""
    text = " ".join(str(error).split())
    return (text[:200] + "...") if len(text) > 200 else (text or type(error).__name__)
