"""Trace batches of a fixed shape once, from their samples to what is wanted of them, compile that, and replay it.

Python runs during tracing only. The trace holds the forward pass, the backward pass, per-sample gradients and clipping
as one line of operations, which the compiler fuses; on a GPU one graph launch replays them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from modelmix.gradients.batch import Batch
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.forms import DenseGradients, Gradients
from modelmix.gradients.layers import LayerCall
from modelmix.gradients.lazy import FromLayerCalls, LazyGradients
from modelmix.gradients.trace import one_line

_TOLERANCE = 1e-2  # rounding to float32 in another order, through many layers
_CHECKED = 32  # samples on which both are compared
_BACKEND = "inductor"


Stamps = list[tuple[Tensor, int]]
"""Tensors, and how often each had been written to."""

Values = dict[str, Tensor]
"""Parameters by name."""

Reference = Callable[[int, Clip], ClippedSum]
"""The sum of the first samples of a batch, as many as are given, uncompiled and in full precision."""


class CompilationRejected(Exception):  # noqa: N818, the compiler's word for it
    """A model cannot be compiled, or what was compiled gives another sum."""


class CompiledGraph:
    """Trace a function of tensors for the shapes of the first ones, compile it, and replay it.

    Args:
        function: nothing in it looks at a value.
        steady, rest: what it is first called with; of these, tensors that are the same in most calls.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], steady: Any, *rest: Any) -> None:
        self._steady: Stamps = []  # what was copied last; own parameters may be of another precision
        self._graph: torch.cuda.CUDAGraph | None = None
        self._on_gpu = tree_leaves(steady)[0].is_cuda
        problem: Exception | None = None
        for layout in (torch.channels_last, torch.preserve_format) if self._on_gpu else (torch.preserve_format,):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the compiler talks to its own developers
                    self._prepare(function, (steady, *rest), layout)
            except Exception as error:  # a model may insist on one layout
                problem = error
            else:
                break
        else:
            raise CompilationRejected(f"{type(problem).__name__}: {one_line(problem)}") from problem

    def _prepare(self, function: Callable[..., tuple[Tensor, ...]], case: Any, layout: torch.memory_format) -> None:
        def laid_out(t: Tensor) -> Tensor:
            return t.clone(memory_format=layout if t.dim() == 4 else torch.preserve_format)

        def line(steady: Any, *rest: Any) -> tuple[Tensor, ...]:
            return function(tree_map(laid_out, steady), *rest)

        # Copies that stay where they are: a replayed graph reads the same memory every time. What is steady keeps its
        # layout, in which many tensors are copied in one launch, and is laid out within the graph.
        self._case = (tree_map(torch.clone, case[0]), *tree_map(laid_out, case[1:]))
        with torch.no_grad():
            trace = make_fx(line, tracing_mode="fake", _allow_non_fake_inputs=True)(*self._case)
        self.draws = any(_draws(node) for node in trace.graph.nodes)
        """Whether the function draws random numbers."""
        self._run = torch.compile(trace, fullgraph=True, dynamic=False, backend=_BACKEND)
        self._compute()

    def capture(self) -> None:
        """Capture all kernels in one CUDA graph; what asks the device something on its way runs as it is."""
        if not self._on_gpu or self.draws:  # a replay would repeat its draws
            return
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._out = self._compute()
        except RuntimeError as error:
            torch.cuda.synchronize()  # raises again if the device itself is lost
            warnings.warn(
                f"the compiled model is not replayed as one graph, which is right and slower: {error}", stacklevel=2
            )
        else:
            self._graph = graph

    def __call__(self, steady: Any, *rest: Any) -> tuple[Tensor, ...]:
        """Return what the function returns; the next call may write over it."""
        leaves, own = tree_leaves(steady), tree_leaves(self._case[0])
        stamps = [(t, t._version) for t in leaves]
        changed = [i for i, now in enumerate(stamps) if not self._steady or not _same(now, self._steady[i])]
        if changed:  # every launch that is saved counts where chunks are short
            torch._foreach_copy_([own[i] for i in changed], [leaves[i] for i in changed])
            self._steady = stamps
        for mine, theirs in zip(tree_leaves(self._case[1:]), tree_leaves(rest), strict=True):
            mine.copy_(theirs)
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        return self._out

    @property
    def steady(self) -> Any:
        """What is the same in most calls, as the last one had it."""
        return self._case[0]

    def _compute(self) -> tuple[Tensor, ...]:
        with torch.no_grad():
            out: tuple[Tensor, ...] = self._run(*self._case)
        return out


class CompiledSum:
    """Sum clipped gradients for batches of the shapes of the first one.

    Args:
        take: the gradients of a batch at given parameters, uncompiled.
        parameters, batch: the first batch.
        reference: of the first batch.
    """

    def __init__(
        self,
        take: Callable[[Values, Batch], list[Gradients]],
        parameters: Values,
        batch: Batch,
        clip: Clip,
        reference: Reference,
    ) -> None:
        def traced(steady: Any, inputs: Any, targets: Any, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            values, limits = steady
            gradients = take(values, Batch(inputs, targets, weights, batch.rows_per_sample))
            return clip.sum_traceable(gradients, weights, *limits)

        # First as it is, on some samples: what is decided by measuring is decided then, for a trace cannot measure.
        few, weights = batch.part(slice(_CHECKED)), batch.sample_weights
        plain = clip.sum(take(parameters, few), few.sample_weights)
        self._clip, self._limits = clip, clip.limits_on(weights.device)
        self._graph = CompiledGraph(traced, (parameters, self._limits), batch.inputs, batch.targets, weights)
        if not self._graph.draws:
            some = weights.clone()
            some[_CHECKED:] = 0
            require_equal(self(parameters, replace(batch, weights=some), clip), plain, reference(_CHECKED, clip))
        self._graph.capture()

    @property
    def draws(self) -> bool:
        """Whether a pass draws random numbers."""
        return self._graph.draws

    def __call__(self, parameters: Values, batch: Batch, clip: Clip) -> ClippedSum:
        weights = batch.sample_weights
        if clip != self._clip:
            self._clip, self._limits = clip, clip.limits_on(weights.device)
        found = self._graph((parameters, self._limits), batch.inputs, batch.targets, weights)
        total, norms, cut = (t.clone() for t in found)
        return ClippedSum(total, norms, cut, weights > 0)


class CompiledLayerCalls:
    """Return what the layers see of batches of the shapes of the first one; gradients come of it, uncompiled.

    Args:
        see: the calls of layers in a batch, at given parameters.
        parameters, batch, reference: as of ``CompiledSum``.
    """

    _CLIP = Clip(1.0)

    def __init__(
        self, see: Callable[[Values, Batch], list[LayerCall]], parameters: Values, batch: Batch, reference: Reference
    ) -> None:
        def traced(values: Values, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
            calls = see(values, replace(batch, inputs=inputs, targets=targets))
            self._calls = [(replace(call, seen=()), len(call.seen)) for call in calls]
            return tuple(t for call in calls for t in call.seen)

        few, self._samples = batch.part(slice(_CHECKED)), batch.samples
        plain = self._summed(FromLayerCalls(see(parameters, few), parameters, few.samples))
        self._graph = CompiledGraph(traced, parameters, batch.inputs, batch.targets)
        if not self._graph.draws:
            mine = self._summed(self(parameters, batch).first(few.samples))
            require_equal(mine, plain, reference(few.samples, self._CLIP))
        self._graph.capture()

    def __call__(self, parameters: Values, batch: Batch) -> LazyGradients:
        """Return gradients that the next call may write over."""
        found = iter(self._graph(parameters, batch.inputs, batch.targets))
        calls = [replace(call, seen=tuple(islice(found, count))) for call, count in self._calls]
        return FromLayerCalls(calls, self._graph.steady, self._samples)

    def _summed(self, gradients: LazyGradients) -> ClippedSum:
        sizes = [p.numel() for p in gradients.parameters.values()]
        kind = torch.promote_types(next(iter(gradients.parameters.values())).dtype, torch.float32)
        found = DenseGradients(gradients.columns(slice(0, sum(sizes)), kind, sum(sizes)))
        return self._CLIP.sum([found], torch.ones(found.samples, dtype=torch.float64, device=found.device))


def require_equal(mine: ClippedSum, plain: ClippedSum, exact: ClippedSum) -> None:
    """Trust what a compiler or a kernel does to a model after it has shown the same sum as the model itself.

    Args:
        exact: the sum in the precision of the given parameters. In less precision a sum can be far from it, and two
            that are rounded differently far from each other; a compiled one may not be much farther than one that is
            not.
    """
    norms = [part.norms.nan_to_num(0.0, 0.0, 0.0) for part in (mine, plain, exact)]
    for here, there, right in ((mine.total, plain.total, exact.total), norms):
        allowed = 2 * (there - right).norm() + _TOLERANCE * right.norm()
        off = (here - right).norm()
        if not bool(off <= allowed):
            raise CompilationRejected(
                f"the sum is off by {float(off):.2g} where {float(allowed):.2g} would be rounding"
            )


def same_tensors(a: Stamps, b: Stamps) -> bool:
    """Whether two lists name the same tensors in the same state."""
    return len(a) == len(b) and all(_same(now, then) for now, then in zip(a, b, strict=True))


def _same(now: tuple[Tensor, int], then: tuple[Tensor, int]) -> bool:
    return now[0] is then[0] and now[1] == then[1]


def _draws(node: torch.fx.Node) -> bool:
    """Whether an operation draws random numbers. Attention says that it may, and does if it drops something."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in arguments), node.args, strict=False)) | node.kwargs
    dropped = {a.name: given.get(a.name, a.default_value) for a in arguments}.get("dropout_p")
    return dropped != 0.0
