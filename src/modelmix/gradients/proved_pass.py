"""Prove of a model's traced pass that samples do not meet in it, and replay that very graph from then on.

One graph serves batches of every size, see ``trace``; the proof is in ``dataflow``.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from itertools import islice
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from modelmix.errors import UnprovedError
from modelmix.gradients.batch import Batch, Loss, PassResult
from modelmix.gradients.dataflow import MeetingError, PerSample, prove
from modelmix.gradients.layers import LayerCall, add_up
from modelmix.gradients.memory import ALONE
from modelmix.gradients.trace import HINTS, Trace, generalise, results_of, rules_of, text_of, trace_pass


class ProvedPass:
    """Run a model's forward and backward pass on any number of samples, in which samples do not meet.

    Args:
        model, loss: traced once, and not run again.
        parameters, batch: of which shapes, types and devices are used and no value is.

    Raises:
        MeetingError: if it cannot be proved that samples stay apart.
        ModelMixError: if the hook engine cannot follow a layer.
    """

    def __init__(self, model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: Batch) -> None:
        case = (parameters, batch.inputs, batch.targets)
        self._names, self._copies = list(parameters), batch.rows_per_sample
        one, other = (trace_pass(model, loss, case, self._copies, hints) for hints in HINTS)
        if rules_of(one) != rules_of(other):
            raise MeetingError("a layer is used otherwise in larger batches")
        traces = [one, other]
        if text_of(one.module) != text_of(other.module):
            generalise(one, other, case, self._copies)
            traces = [one]
        self._form, self._leaves, self._calls = one.form, one.leaves, one.calls
        of_samples = [i >= len(parameters) for i in range(len(tree_flatten(case)[0]))]
        self._dims, *same = (_dims_of_results(trace, of_samples) for trace in traces)
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

    def gradients(self, parameters: dict[str, Tensor], batch: Batch) -> PassResult:
        """Compute the gradients of every sample, the outputs, and the loss of every row."""
        if self.holds_for(samples := batch.samples):
            found, outputs, losses = self._replay(self._take, parameters, batch, samples)
            return PassResult(add_up(found), outputs, losses)
        calls, outputs, losses = self.calls(parameters, batch)
        return PassResult(add_up(call.gradients(parameters) for call in calls), outputs, losses)

    def calls(self, parameters: dict[str, Tensor], batch: Batch) -> tuple[list[LayerCall], Any, Tensor]:
        """Return what layers saw of a batch, from which gradients can be computed later; outputs and losses."""
        seen, outputs, losses = self._replay(self._see, parameters, batch, batch.samples)
        found = iter(seen)
        return [replace(call, seen=tuple(islice(found, count))) for call, count in self._calls], outputs, losses

    def holds_for(self, samples: int) -> bool:
        """Whether the proof covers this number of samples: whether one of the traces has supposed nothing else."""
        if samples not in self._holds:
            self._holds[samples] = samples > 1 and any(
                all(part.xreplace({symbol: sympy.Integer(samples)}) == sympy.true for part in parts)
                for symbol, parts in self._supposed
            )
        return self._holds[samples]

    def _replay(
        self, module: fx.GraphModule, parameters: dict[str, Tensor], batch: Batch, samples: int
    ) -> tuple[list[Any], Any, Tensor]:
        given = tree_leaves((batch.inputs, batch.targets))
        if not self._any_layout:
            given = [t.contiguous() for t in given]
        values = [parameters[name] for name in self._names]
        with torch.no_grad():
            if self.holds_for(samples):
                out = module(*values, *given)
            else:
                out = self._joined(module, values, given, self._parts(samples))
        tensors = iter(out)
        leaves = [next(tensors) if leaf is None else leaf for leaf in self._leaves]
        losses = next(tensors)
        return list(tensors), tree_unflatten(leaves, self._form), losses

    def _parts(self, samples: int) -> list[tuple[int, int]]:
        """List (samples, samples with padding) of each part of a batch, every one of which the proof covers.

        A batch for which the traces do not speak runs in parts for which they do. Another engine would be a choice by
        the number of samples, which is private.
        """
        if samples == 1 and self.holds_for(2):  # a size of one means other things to torch
            return [(1, 2)]
        return [(min(self._block, samples - start), self._block) for start in range(0, samples, self._block)]

    def _joined(
        self, module: fx.GraphModule, values: list[Tensor], given: list[Tensor], parts: list[tuple[int, int]]
    ) -> list[Tensor]:
        """Join the results of a batch from those of its parts, which are padded with their first sample."""
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


def per_sample(model: nn.Module, loss: Loss, parameters: dict[str, Tensor], batch: Batch) -> PassResult:
    """Compute the gradient of every sample by a pass that is proved on the spot."""
    try:
        return ProvedPass(model, loss, parameters, batch).gradients(parameters, batch)
    except MeetingError as reason:
        raise unproved(reason) from reason


def unproved(reason: Any) -> UnprovedError:
    """Return the refusal of a model for which the hook engine was asked by name."""
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


def _dims_of_results(trace: Trace, batch: list[bool]) -> list[int | None]:
    """Prove a trace, and find where its results hold samples."""
    values = prove(trace.module.graph, trace.samples, batch)
    results = (values[node] for node in results_of(trace.module.graph))
    return [value.dim if isinstance(value, PerSample) else None for value in results]


def _suppositions(trace: Trace) -> tuple[Any, list[Any]]:
    """The symbol m, and what must be true of it for the trace to be the same.

    Torch notes every question about m that its code has asked while tracing (is it below 16?) and that is not answered
    alike for all numbers of samples.
    """
    shapes = trace.shapes
    if shapes.deferred_runtime_asserts or len(shapes.var_to_range) > 1:
        raise MeetingError("a shape depends on values")
    return trace.samples, [guard.expr for guard in shapes.guards]


def _cut(t: Tensor, dim: int | None, samples: int, padded: int) -> Tensor:
    """Cut off the rows that are padding."""
    return t if dim is None else t.narrow(dim, 0, t.shape[dim] // padded * samples)


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


def _with_gradients(trace: Trace, names: list[str], first: int) -> fx.GraphModule:
    """Add to the graph every layer's gradients, computed as soon as all that it saw is there."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(trace.module.graph, copied)
    placed = [copied[n] for n in trace.module.graph.nodes if n.op == "placeholder"]
    parameters = dict(zip(names, placed, strict=False))
    results = [copied[node] for node in results_of(trace.module.graph)]
    order = {node: i for i, node in enumerate(graph.nodes)}
    seen, taken = iter(results[first:]), []
    for call, count in trace.calls:
        given = list(islice(seen, count))
        with graph.inserting_after(max(given, key=order.__getitem__)):
            values = [parameters[name] for name in call.names.values()]
            taken.append(graph.call_function(call.as_function(), (values, *given)))
    graph.output([*results[:first], *taken])
    return fx.GraphModule(trace.module, graph)
