"""Trace a model's pass once, prove that samples do not meet in it, and replay that very graph from then on.

The trace is made with fake tensors and a symbolic number of samples: no private value is looked at, and one graph
serves chunks of every size. No Python of the model runs after it: counters, the clock or the size of a chunk cannot
change what is computed.
"""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import sympy
import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.modules import transformer
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from modelmix.errors import ModelMixError, UnprovedError
from modelmix.gradients.engines import hooks
from modelmix.gradients.engines.independence import ALL, MeetingError, Rows, prove
from modelmix.gradients.engines.universal import Loss
from modelmix.gradients.gradients import Gradients
from modelmix.gradients.memory import ALONE

_HINTS = ((7, 5, 3, 11, 13, 17, 19), (67, 71, 73, 79, 83))
"""Numbers of samples that the two traces are made with; the first of each that is no size of a tensor at hand."""
_FEW = 16  # rows; torch asks whether a convolution has fewer, so the first trace should and the second should not

_SMALL = 4096  # entries of a constant that are compared
_ZEROED: dict[Any, Any] = {
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
}


@dataclass
class _Trace:
    """One trace, and what its outputs are.

    Args:
        module: of parameters, inputs and targets, flat; gives tensors of the model's outputs, losses, what layers saw.
        samples: the symbol m; hint: what it stood for while tracing.
        shapes: what tracing has supposed about m.
        form: of the model's outputs.
        leaves: of the outputs; None for a tensor.
        uses: without what was seen, and how many tensors that is.
    """

    module: fx.GraphModule
    samples: Any
    shapes: ShapeEnv
    hint: int
    form: TreeSpec
    leaves: list[Any]
    uses: list[tuple[hooks.Use, int]]


class ProvedPass:
    """The forward and backward pass of a model on chunks of any number of samples, in which samples do not meet.

    Args:
        model, loss: traced once, and not run again.
        parameters, inputs, targets: of which shapes, types and devices are used and no value is.
        copies: rows of a sample.

    Raises:
        MeetingError: if it cannot be proved that samples stay apart.
        ModelMixError: if the hook engine cannot follow a layer.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int
    ) -> None:
        case = (parameters, inputs, targets)
        self._names, self._copies = list(parameters), copies
        one, other = (_traced(model, loss, case, copies, hints) for hints in _HINTS)
        if _rules(one) != _rules(other):
            raise MeetingError("a layer is used otherwise in larger batches")
        traces = [one, other]
        if _text(one.module) != _text(other.module):
            _generalise(one, other, case, copies)
            traces = [one]
        self._form, self._leaves, self._uses = one.form, one.leaves, one.uses
        batch = [i >= len(parameters) for i in range(len(tree_flatten(case)[0]))]
        self._dims, *same = (_dims_of_results(trace, batch) for trace in traces)
        if same and same[0] != self._dims:
            raise MeetingError("larger batches are laid out otherwise")
        # The graph is one and proved for both; which numbers of samples that covers is what the traces supposed.
        self._supposed = [_suppositions(trace) for trace in traces]
        self._holds: dict[int, bool] = {}
        self._block = traces[-1].hint  # samples for which a trace holds whatever it has supposed
        tensors = sum(leaf is None for leaf in one.leaves)
        if any(self._dims[tensors:]):
            raise MeetingError("a layer does not have the samples first")
        self._any_layout = _simplify(one.module.graph)
        for node in one.module.graph.nodes:
            node.meta.clear()  # fake tensors, and with them all that is known of shapes
        _own_constants(one.module, model)
        self._see = one.module
        self._see.recompile()
        self._take = _with_gradients(one, self._names, tensors + 1)

    def gradients(
        self, parameters: dict[str, Tensor], inputs: Any, targets: Any
    ) -> tuple[dict[str, Gradients], Any, Tensor]:
        """The gradients of every sample by parameter, the outputs, and the loss of every row.

        A parameter that is not used is missing.
        """
        parts = self._parts(inputs, targets)
        if len(parts) > 1 or parts[0][0] != parts[0][1]:
            uses, outputs, losses = self.uses(parameters, inputs, targets)
            return hooks.add_up(use.gradients(parameters) for use in uses), outputs, losses
        found, outputs, losses = self._replay(self._take, parameters, inputs, targets)
        return hooks.add_up(found), outputs, losses

    def uses(self, parameters: dict[str, Tensor], inputs: Any, targets: Any) -> tuple[list[hooks.Use], Any, Tensor]:
        """What layers saw of a chunk, from which gradients can be computed later; outputs and losses."""
        seen, outputs, losses = self._replay(self._see, parameters, inputs, targets)
        found = iter(seen)
        return [replace(use, seen=tuple(islice(found, count))) for use, count in self._uses], outputs, losses

    def holds_for(self, samples: int) -> bool:
        """Whether the proof covers this number of samples: whether one of the traces has supposed nothing else."""
        if samples not in self._holds:
            self._holds[samples] = samples > 1 and any(
                all(part.xreplace({symbol: sympy.Integer(samples)}) == sympy.true for part in parts)
                for symbol, parts in self._supposed
            )
        return self._holds[samples]

    def _parts(self, inputs: Any, targets: Any) -> list[tuple[int, int]]:
        """How a chunk is run: (samples, samples with padding) of each part, every one of which the proof covers.

        A chunk for which the traces do not speak runs in parts for which they do. Another engine would be a choice by
        the number of samples, which is private.
        """
        samples = int(tree_leaves((inputs, targets))[0].shape[0]) // self._copies
        if self.holds_for(samples):
            return [(samples, samples)]
        if samples == 1 and self.holds_for(2):  # a size of one means other things to torch
            return [(1, 2)]
        return [(min(self._block, samples - start), self._block) for start in range(0, samples, self._block)]

    def _replay(
        self, module: fx.GraphModule, parameters: dict[str, Tensor], inputs: Any, targets: Any
    ) -> tuple[list[Any], Any, Tensor]:
        given, parts = tree_leaves((inputs, targets)), self._parts(inputs, targets)
        if not self._any_layout:
            given = [t.contiguous() for t in given]
        values = [parameters[name] for name in self._names]
        with torch.no_grad():
            if len(parts) == 1 and parts[0][0] == parts[0][1]:
                out = module(*values, *given)
            else:
                out = self._joined(module, values, given, parts)
        tensors = iter(out)
        leaves = [next(tensors) if leaf is None else leaf for leaf in self._leaves]
        losses = next(tensors)
        return list(tensors), tree_unflatten(leaves, self._form), losses

    def _joined(
        self, module: fx.GraphModule, values: list[Tensor], given: list[Tensor], parts: list[tuple[int, int]]
    ) -> list[Tensor]:
        """The results of a chunk from those of its parts, which are padded with their first sample."""
        found, start, k = [], 0, self._copies
        for samples, padded in parts:
            rows = [t[start * k : (start + samples) * k] for t in given]
            rows = [torch.cat([t, *[t[:k]] * (padded - samples)]) for t in rows]
            out = module(*values, *rows)
            found.append([_cut(t, dim, samples, padded) for t, dim in zip(out, self._dims, strict=True)])
            start += samples
        return [
            parts[0] if dim is None else torch.cat(parts, dim)
            for parts, dim in zip(zip(*found, strict=True), self._dims, strict=True)
        ]


def per_sample(
    model: nn.Module, loss: Loss, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int
) -> dict[str, Gradients]:
    """The gradient of every sample, by parameter, from a pass that is proved on the spot."""
    try:
        return ProvedPass(model, loss, parameters, inputs, targets, copies).gradients(parameters, inputs, targets)[0]
    except MeetingError as reason:
        raise unproved(reason) from reason


def unproved(reason: Any) -> UnprovedError:
    """The refusal of a model for which the hook engine was asked by name."""
    return UnprovedError(
        ALONE,
        f"the hook engine cannot show that samples stay apart: {reason}.",
        'Use engine="auto", which runs such a model one sample at a time.',
    )


def _own_constants(module: fx.GraphModule, model: nn.Module) -> None:
    """Copy the tensors that a trace has found in Python: what becomes of them later is nothing to the pass.

    Buffers and frozen parameters stay shared, for they can be large; others watch that they do not change.
    """
    shared = {id(t) for t in (*model.buffers(), *model.parameters())}
    for node in module.graph.nodes:
        constant = getattr(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(constant, Tensor) and id(constant) not in shared:
            delattr(module, str(node.target))
            module.register_buffer(str(node.target), constant.detach().clone(), persistent=False)


def _dims_of_results(trace: _Trace, batch: list[bool]) -> list[int | None]:
    """Prove a trace, and find where its results hold samples."""
    values = prove(trace.module.graph, trace.samples, batch)
    results = (values[node] for node in _results(trace.module.graph))
    return [value.dim if isinstance(value, Rows) else None for value in results]


def _suppositions(trace: _Trace) -> tuple[Any, list[Any]]:
    """The symbol m, and what must be true of it for the trace to be the same.

    Torch notes every question about m that its code has asked while tracing (is it below 16?) and that is not answered
    alike for all numbers of samples.
    """
    shapes = trace.shapes
    if shapes.deferred_runtime_asserts or len(shapes.var_to_range) > 1:
        raise MeetingError("a shape depends on values")
    return trace.samples, [guard.expr for guard in shapes.guards]


def _cut(t: Tensor, dim: int | None, samples: int, padded: int) -> Tensor:
    """The rows of samples that are no padding."""
    return t if dim is None else t.narrow(dim, 0, t.shape[dim] // padded * samples)


def _traced(model: nn.Module, loss: Loss, case: Any, copies: int, hints: tuple[int, ...]) -> _Trace:
    flat, form = tree_flatten(case)
    count = len(case[0])
    taken = {size for t in (*flat, *model.buffers(), *model.parameters()) for size in t.shape}
    free = [h for h in hints if h not in taken and h * copies not in taken] or [hints[-1]]
    hint = next((h for h in free if h * copies < _FEW), free[0])
    symbol, shapes, fake = _fake(flat, count, copies, hint)
    kept: dict[str, Any] = {}

    def line(*flat: Tensor) -> list[Tensor]:
        parameters, inputs, targets = tree_unflatten(list(flat), form)
        done = hooks.run(model, loss, parameters, inputs, targets, copies)
        leaves, kept["form"] = tree_flatten(done.outputs)
        kept["leaves"] = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kept["uses"] = [(replace(use, seen=()), len(use.seen)) for use in done.uses]
        seen = [t for use in done.uses for t in use.seen]
        return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), done.losses, *seen]

    with torch.no_grad(), _undisturbed(model):
        try:
            module = make_fx(line, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fake)
        except (ModelMixError, MeetingError):
            raise
        except Exception as error:  # whatever fake tensors cannot do: values that decide, shapes that depend on values
            raise MeetingError(f"it cannot be traced ({_line(error)})") from error
    if not isinstance(module.graph, fx.Graph) or not kept:
        raise MeetingError("it cannot be traced")
    _normalise(module.graph)
    return _Trace(module, symbol, shapes, hint, kept["form"], kept["leaves"], kept["uses"])


def _fake(flat: list[Tensor], count: int, copies: int, hint: int) -> tuple[Any, ShapeEnv, list[Tensor]]:
    """The symbol m, what is known of it, and tensors without values.

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


def _generalise(one: _Trace, other: _Trace, case: Any, copies: int) -> None:
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
            raise MeetingError(f"it cannot be traced ({_line(error)})") from error
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
    """The state of Python's and numpy's generators, on which a model may draw behind torch's back."""
    numpy: Any = np.random.get_state()  # noqa: NPY002, whoever draws on the old one is to be noticed
    return random.getstate(), numpy[1].tobytes(), numpy[2]


def _results(graph: fx.Graph) -> list[fx.Node]:
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


def _text(module: fx.GraphModule) -> str:
    """Equal for traces of the same operations with the same constants."""
    number: dict[fx.Node, int] = {}
    lines = []
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        target = _constant(module, node) if node.op == "get_attr" else node.target
        lines.append(f"{node.op} {target} {arguments}")
        number[node] = len(number)
    return "\n".join(lines)


def _rules(trace: _Trace) -> list[Any]:
    """How the gradients of every layer will be computed: for which parameters, and with how many rows of a sample."""
    return [(dict(use.names), getattr(use.rule, "keywords", None), count) for use, count in trace.uses]


def _constant(module: fx.GraphModule, node: fx.Node) -> Any:
    """One of the model's own is recognised by its place, one that its code makes anew by its values."""
    constant = getattr(module, str(node.target))
    if not isinstance(constant, Tensor):
        return constant
    small = constant.numel() <= _SMALL and constant.layout == torch.strided and not constant.is_meta
    return constant.tolist() if small else (constant.data_ptr(), tuple(constant.shape))


def _simplify(graph: fx.Graph) -> bool:
    """Drop copies that only autograd needed. Where something is still written in place, a copy may matter: all stay.

    Returns:
        Whether the graph takes inputs in any layout; otherwise they must be contiguous, as they were when traced.
    """
    aten = torch.ops.aten
    for node in graph.nodes:
        if _is_written(node) and _is_fresh(node.args[0]):
            pure = getattr(getattr(aten, node.target._opname[:-1], None), node.target._overloadname, None)
            node.target = pure or node.target
    if any(map(_is_written, graph.nodes)):
        return False
    for node in list(graph.nodes):
        plain = node.op == "call_function" and not node.kwargs
        if plain and node.target in (aten.detach.default, aten.alias.default, aten.clone.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default  # the same numbers, however the inputs lie in memory
    return True


def _is_written(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_fresh(node: Any) -> bool:
    """Whether a tensor is an operation's own result that nobody reads but the one who writes to it."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return False
    source = node.args[0] if node.target is operator.getitem else node
    if not isinstance(source, fx.Node) or not isinstance(source.target, torch._ops.OpOverload):
        return False
    return all(a.alias_info is None for a in source.target._schema.arguments)


def _with_gradients(trace: _Trace, names: list[str], first: int) -> fx.GraphModule:
    """The same graph, in which every layer's gradients are computed as soon as all that it saw is there."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(trace.module.graph, copied)
    placed = [copied[n] for n in trace.module.graph.nodes if n.op == "placeholder"]
    parameters = dict(zip(names, placed, strict=False))
    results = [copied[node] for node in _results(trace.module.graph)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    seen, taken = iter(results[first:]), []
    for use, count in trace.uses:
        given = list(islice(seen, count))
        with graph.inserting_after(max(given, key=order.__getitem__)):
            values = [parameters[name] for name in use.names.values()]
            taken.append(graph.call_function(_taker(use), (values, *given)))
    graph.output([*results[:first], *taken])
    return fx.GraphModule(trace.module, graph)


def _taker(use: hooks.Use) -> Callable[..., dict[str, Gradients]]:
    def take(values: list[Tensor], *seen: Tensor) -> dict[str, Gradients]:
        return replace(use, seen=seen).gradients(dict(zip(use.names.values(), values, strict=True)))

    return take


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:200] + "...") if len(text) > 200 else (text or type(error).__name__)
