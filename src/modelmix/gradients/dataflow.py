"""Prove that samples never meet: a dataflow analysis of a traced pass.

DP-SGD needs that a sample's gradient is a function of that sample, the released state and public randomness alone. A
trace with a symbolic number of samples m shows every ATen operation between the batch and what the layers saw. Each of
its tensors gets an abstract value:

- ``PUBLIC``: computed from parameters, constants and random draws only, and without a dimension that grows with m.
- ``PerSample(dim)``: dimension ``dim`` has k*m entries, of which the k from i*k on are computed from sample i, public
  values and random draws only; all other dimensions have a fixed size.
- ``SIZE``: a number computed from m. It may say how large a tensor is, and never become a value in one.
- ``OPAQUE``: scratch of an operator that only its own backward operator reads (seeds, empty statistics).

Every operation has one rule (``aten_rules``, ``aten_view_rules``, ``aten_layer_rules``). An operation without a rule, a
rule that cannot follow, or a result whose shape is not what the rule says, and nothing is proved: the graph is refused
with the reason. A graph that passes is replayed as it is, so what was proved is what runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves


class MeetingError(Exception):
    """It cannot be shown that samples stay apart; the message says why."""


@dataclass(frozen=True)
class PerSample:
    """Dimension ``dim`` is divided among the samples in order, and nothing else is."""

    dim: int


@dataclass(frozen=True)
class _Mark:
    name: str


PUBLIC, SIZE, OPAQUE = _Mark("public"), _Mark("size"), _Mark("opaque")
Value = PerSample | _Mark
Rule = Callable[["Call"], Any]
"""The values of an operation's results: one, or a sequence of them (None where there is no tensor)."""

RULES: dict[str, Rule] = {}
"""By the name of an operation without its overload, "aten::add" for instance; in-place variants share it."""

ALL = 2**63 - 1
"""The end of a slice that has none."""

SIZES: dict[str, frozenset[str]] = {}
"""Arguments of an operation that may be computed from the number of samples: they are shapes."""


def rule(*names: str, sizes: Sequence[str] = ()) -> Callable[[Rule], Rule]:
    """Register the rule of some operations, and which of their arguments are shapes."""

    def register(function: Rule) -> Rule:
        for name in names:
            full = name if "::" in name else f"aten::{name}"
            if full in RULES:
                raise ValueError(f"{full} has two rules")
            RULES[full], SIZES[full] = function, frozenset(sizes)
        return function

    return register


def growth(size: Any, samples: Any) -> int | None:
    """Count a dimension's entries for every sample; 0 if its size is fixed, None if it grows in another way."""
    if isinstance(size, int):
        return 0
    expression = size.node.expr
    if not expression.free_symbols:
        return 0
    each = expression / samples
    return int(each) if each.is_Integer and each > 0 else None


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are one expression of the number of samples; asking the numbers would add a guard."""
    a, b = (size if isinstance(size, int) else size.node.expr for size in (a, b))
    return bool(a == b)


class Call:
    """Hold one operation of a graph, with the abstract values of what goes in.

    Args:
        node: of the graph, whose target is an ATen operation.
        values: of all earlier nodes.
        samples: the symbol m.
    """

    def __init__(self, node: fx.Node, values: dict[fx.Node, Any], samples: Any) -> None:
        self.node, self.samples, self._values = node, samples, values
        schema = node.target._schema  # type: ignore[union-attr]
        self.name: str = schema.name
        given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | node.kwargs
        self.arguments: dict[str, Any] = {a.name: given.get(a.name, a.default_value) for a in schema.arguments}
        self.out: Any = node.meta.get("val")

    def __getitem__(self, name: str) -> Any:
        """Return an argument as the graph has it."""
        return self.arguments[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.arguments.get(name, default)

    def refuse(self, what: str = "") -> MeetingError:
        name = self.name.replace("aten::", "").rstrip("_").lstrip("_")
        return MeetingError(what or f"{name} over the batch")

    # Abstract values.

    def value(self, name: str) -> Any:
        return self.value_of(self.arguments[name])

    def value_of(self, argument: Any) -> Any:
        """Return the abstract value; PUBLIC for what is no node: numbers and None."""
        return self._values[argument] if isinstance(argument, fx.Node) else PUBLIC

    def tensors(self) -> list[fx.Node]:
        """List the arguments that are tensors, also within lists."""
        nodes = [n for n in tree_leaves(list(self.arguments.values())) if isinstance(n, fx.Node)]
        return [n for n in nodes if isinstance(n.meta.get("val"), Tensor)]

    def rows_dim(self, name: str) -> int | None:
        """Find the dimension in which an argument holds samples; None for a public one."""
        value = self.value(name)
        if value is OPAQUE:
            raise self.refuse(f"{self.name} reads another operation's scratch")
        return value.dim if isinstance(value, PerSample) else None

    def require_public(self, *names: str) -> None:
        for name in names:
            if name in self.arguments and any(
                self.value_of(n) is not PUBLIC for n in tree_leaves(self.arguments[name])
            ):
                raise self.refuse(f"{name} of {self.name} is computed from samples")

    def require_rows(self, dim: int, *names: str) -> None:
        """Refuse, unless every named argument that is not None holds samples in that dimension."""
        for name in names:
            if self.arguments.get(name) is not None and self.value(name) != PerSample(dim):
                raise self.refuse(f"{name} of {self.name} does not hold samples in dimension {dim}")

    def require_rows_or_public(self, dim: int, *names: str) -> None:
        for name in names:
            if self.arguments.get(name) is not None and self.value(name) not in (PerSample(dim), PUBLIC):
                raise self.refuse(f"{name} of {self.name} does not hold samples in dimension {dim}")

    # Shapes.

    def shape(self, name: str) -> tuple[Any, ...]:
        return tuple(self.arguments[name].meta["val"].shape)

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def growing(self, shape: Sequence[Any]) -> list[int]:
        """List the dimensions that grow with the number of samples."""
        return [i for i, size in enumerate(shape) if growth(size, self.samples) != 0]

    def of_shape(self, shape: Sequence[Any]) -> Value:
        """Value a tensor whose entries are all alike or drawn: samples lie where it grows with their number."""
        where = self.growing(shape)
        return PerSample(where[0]) if where else PUBLIC

    def aligned(self, nodes: Sequence[Any], rank: int) -> int | None:
        """Find where samples lie after tensors are broadcast together to ``rank`` dimensions."""
        found = set()
        for node in nodes:
            value = self.value_of(node)
            if value is OPAQUE:
                raise self.refuse(f"{self.name} reads another operation's scratch")
            if isinstance(value, PerSample):
                found.add(value.dim + rank - len(node.meta["val"].shape))
        if len(found) > 1:
            raise self.refuse("samples meet by broadcasting")
        return found.pop() if found else None


def prove(graph: fx.Graph, samples: Any, batch: Sequence[bool]) -> dict[fx.Node, Any]:
    """Find the abstract value of every node, or refuse.

    Args:
        graph: a trace; every node has its fake tensor in ``meta["val"]``.
        samples: the symbol m of that trace.
        batch: which of its inputs hold samples, in their first dimension; the others are public.

    Returns:
        The value of every node.

    Raises:
        MeetingError: if samples may meet, in the words of whoever has to change the model.
    """
    from modelmix.gradients import aten_layer_rules  # noqa: F401, registers the rules, with those it builds on

    values: dict[fx.Node, Any] = {}
    owner: dict[fx.Node, fx.Node] = {}  # whose memory a view shows
    inputs = iter(batch)
    for node in graph.nodes:
        owner[node] = node
        if node.op == "placeholder":
            values[node] = PerSample(0) if next(inputs) else PUBLIC
        elif node.op == "get_attr":
            values[node] = PUBLIC
        elif node.op == "output":
            continue
        elif node.op != "call_function":
            raise MeetingError(f"{node.op} is not known to keep samples apart")
        elif node.target is operator.getitem:
            values[node] = values[node.args[0]][node.args[1]]
            source = owner[node.args[0]]
            owner[node] = node if source is node.args[0] else source
            continue
        elif not isinstance(node.target, torch._ops.OpOverload) or _is_size(node):
            values[node] = _size(node, values)
            continue
        else:
            call = Call(node, values, samples)
            values[node] = _apply(call, owner)
        _check_shapes(node, values[node], samples)
    return values


def _is_size(node: fx.Node) -> bool:
    return node.target._schema.name in ("aten::sym_size", "aten::sym_numel", "aten::sym_stride")  # type: ignore[union-attr]


def _size(node: fx.Node, values: dict[fx.Node, Any]) -> _Mark:
    """Value arithmetic of sizes, which is Python's."""
    known = _is_size(node) if isinstance(node.target, torch._ops.OpOverload) else _is_arithmetic(node.target)
    arguments = [n for n in tree_leaves([node.args, node.kwargs]) if isinstance(n, fx.Node)]
    if not known or not all(values[n] is SIZE or _is_shape_of(node, n) for n in arguments):
        raise MeetingError(f"{getattr(node.target, '__name__', node.target)} is not known to keep samples apart")
    return SIZE


def _is_arithmetic(target: Any) -> bool:
    module = getattr(target, "__module__", "")
    return module in ("_operator", "operator") or target in (torch.sym_max, torch.sym_min, torch.sym_int)


def _is_shape_of(node: fx.Node, argument: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and isinstance(argument.meta.get("val"), Tensor)


def _apply(call: Call, owner: dict[fx.Node, fx.Node]) -> Any:
    """Value an operation of ATen or of ours, with what it writes to and what it shows."""
    schema = call.node.target._schema  # type: ignore[union-attr]
    name = schema.name
    in_place = _written(call)
    base = name.removesuffix("_") if in_place else name
    if not name.startswith(("aten::", "modelmix::")):
        raise MeetingError(f"{name} is not known to keep samples apart")
    for key, argument in call.arguments.items():
        sized = any(call.value_of(n) is SIZE for n in tree_leaves(argument))
        if sized and key not in SIZES.get(base, ()):
            raise MeetingError(f"{name.removeprefix('aten::')} computes with the number of samples")
    if call.get("generator") is not None:
        raise MeetingError("the model draws from a generator of its own")
    known = RULES.get(base)
    if known is not None:
        found = known(call)
    elif call.tensors() and all(call.value_of(n) is PUBLIC for n in call.tensors()) and not _is_memory(base):
        found = _public(call)
    else:
        raise MeetingError(f"{name.replace('::', '.')} is not known to keep samples apart")
    if in_place:
        target = call.arguments[schema.arguments[0].name]
        root = owner[target]
        if root.op != "call_function":
            raise MeetingError("the model writes to its inputs, its parameters or a constant")
        before, shape = call.value_of(target), target.meta["val"].shape
        if len(shape) != len(call.out.shape) or not all(map(same_size, shape, call.out.shape)):
            raise MeetingError(f"{name.removeprefix('aten::')} changes a shape in place")
        if found != before or isinstance(call.value_of(root), PerSample) != isinstance(before, PerSample):
            raise MeetingError(f"{name.removeprefix('aten::')} writes samples where they may meet")
        owner[call.node] = root
    else:
        shown = [a.name for a in schema.arguments if a.alias_info is not None]
        if shown and isinstance(call.arguments[shown[0]], fx.Node):
            owner[call.node] = owner[call.arguments[shown[0]]]
    return found


def _written(call: Call) -> bool:
    """Whether it is the in-place variant of an operation; any other writing is refused."""
    schema = call.node.target._schema  # type: ignore[union-attr]
    written = [i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return False
    if written != [0] or not schema.name.endswith("_"):
        raise MeetingError(f"{schema.name.replace('::', '.')} writes to its arguments")
    return True


def _is_memory(name: str) -> bool:
    """Whether an operation shows memory that nobody has written to, in which another sample may have left something."""
    return name.partition("::")[2].lstrip("_").startswith(("empty", "new_empty", "resize", "set"))


def _public(call: Call) -> Any:
    """Value a function of public values: its results are public."""
    return [PUBLIC] * len(call.out) if isinstance(call.out, tuple | list) else PUBLIC


def _check_shapes(node: fx.Node, value: Any, samples: Any) -> None:
    """Hold every result against its shape: a rule that is wrong about a shape proves nothing."""
    out = node.meta.get("val")
    results = list(out) if isinstance(out, tuple | list) else [out]
    values = list(value) if isinstance(value, tuple | list) else [value]
    if len(results) != len(values):
        raise MeetingError(f"{node.target} gives {len(results)} results where its rule knows {len(values)}")
    for one, said in zip(results, values, strict=True):
        if not isinstance(one, Tensor):
            continue
        if not isinstance(said, PerSample | _Mark) or said is SIZE:
            raise MeetingError(f"{node.target} gives a tensor that its rule does not know")
        growths = [growth(size, samples) for size in one.shape]
        wanted = [isinstance(said, PerSample) and i == said.dim for i in range(one.dim())]
        right = all(g is not None and (g > 0) == here for g, here in zip(growths, wanted, strict=True))
        if said is OPAQUE:
            continue
        if not right or (isinstance(said, PerSample) and said.dim >= one.dim()) or one.layout != torch.strided:
            raise MeetingError(f"{str(node.target).removesuffix('.default')} changes how samples are laid out")
