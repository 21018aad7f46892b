"""A chunk of fixed shape, traced once from its samples to what is wanted of it, compiled, and replayed.

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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from modelmix.gradients.clipping import Clip, ClippedSum
from modelmix.gradients.engines.chunk import rows
from modelmix.gradients.engines.hooks import Use
from modelmix.gradients.engines.unwritten import OfUses
from modelmix.gradients.gradients import Dense, Gradients, Unwritten

_TOLERANCE = 1e-2  # rounding to float32 in another order, through many layers
_CHECKED = 32  # samples on which both are compared
_BACKEND = "inductor"


Stamps = list[tuple[Tensor, int]]
"""Tensors, and how often each had been written to."""

Take = Callable[[dict[str, Tensor], Any, Any], list[Gradients]]
"""The gradients of the samples of a chunk, given as parameters, inputs and targets."""

See = Callable[[dict[str, Tensor], Any, Any], list[Use]]
"""What the layers see of a chunk, given in the same way."""

Reference = Callable[[slice, Tensor, Clip], ClippedSum]
"""The sum of some rows of a chunk, given with the weights of their samples, uncompiled and in full precision."""


class UnfitError(Exception):
    """This model cannot be compiled, or not rightly."""


class Line:
    """A function of tensors, for the shapes of the first ones.

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
            said = " ".join(str(problem).split())
            raise UnfitError(f"{type(problem).__name__}: {said[:200]}") from problem

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
        """One graph of all kernels; what asks the device something on its way cannot be captured, and runs as it is."""
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
        """What the function returns; the next call may write over it."""
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


class Compiled:
    """The clipped sum for chunks of the shapes of the first one.

    Args:
        take: the gradients of a chunk at given parameters, uncompiled.
        parameters, inputs, targets, weights: the first chunk, of which every sample is ``copies`` rows.
        reference: of the first chunk.
    """

    def __init__(
        self,
        take: Take,
        parameters: dict[str, Tensor],
        inputs: Any,
        targets: Any,
        weights: Tensor,
        clip: Clip,
        copies: int,
        reference: Reference,
    ) -> None:
        def line(steady: Any, inputs: Any, targets: Any, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            parameters, limits = steady
            return clip.at_once(take(parameters, inputs, targets), weights, *limits)

        # First as it is, on some samples: what is decided by measuring is decided then, for a trace cannot measure.
        few = slice(_CHECKED * copies)
        plain = clip.sum(take(parameters, *tree_map(lambda t: t[few], (inputs, targets))), weights[:_CHECKED])
        self._clip, self._limits = clip, clip.limits_on(weights.device)
        self._line = Line(line, (parameters, self._limits), inputs, targets, weights)
        if not self._line.draws:
            some = weights.clone()
            some[_CHECKED:] = 0
            mine = self(parameters, inputs, targets, some, clip)
            require_equal(mine, plain, reference(few, weights[:_CHECKED], clip))
        self._line.capture()

    @property
    def draws(self) -> bool:
        return self._line.draws

    def __call__(
        self, parameters: dict[str, Tensor], inputs: Any, targets: Any, weights: Tensor, clip: Clip
    ) -> ClippedSum:
        if clip != self._clip:
            self._clip, self._limits = clip, clip.limits_on(weights.device)
        total, norms, cut = (t.clone() for t in self._line((parameters, self._limits), inputs, targets, weights))
        return ClippedSum(total, norms, cut, weights > 0)


class CompiledUses:
    """What the layers see of chunks of the shapes of the first one; gradients are computed from it, uncompiled.

    Args:
        see: the uses of layers in a chunk, given as parameters, inputs and targets.
        parameters, inputs, targets, copies, reference: as of ``Compiled``.
    """

    _CLIP = Clip(1.0)

    def __init__(
        self,
        see: See,
        parameters: dict[str, Tensor],
        inputs: Any,
        targets: Any,
        copies: int,
        reference: Reference,
    ) -> None:
        def line(parameters: dict[str, Tensor], inputs: Any, targets: Any) -> tuple[Tensor, ...]:
            uses = see(parameters, inputs, targets)
            self._uses = [(replace(use, seen=()), len(use.seen)) for use in uses]
            return tuple(t for use in uses for t in use.seen)

        few, self._samples = slice(_CHECKED * copies), rows((inputs, targets)) // copies
        count = min(_CHECKED, self._samples)
        some = tree_map(lambda t: t[few], (inputs, targets))
        plain = self._summed(OfUses(see(parameters, *some), parameters, count))
        self._line = Line(line, parameters, inputs, targets)
        if not self._line.draws:
            mine = self._summed(self(parameters, inputs, targets).first(count))
            ones = torch.ones(count, dtype=torch.float64, device=plain.total.device)
            require_equal(mine, plain, reference(few, ones, self._CLIP))
        self._line.capture()

    def __call__(self, parameters: dict[str, Tensor], inputs: Any, targets: Any) -> Unwritten:
        """The next call may write over them."""
        found = iter(self._line(parameters, inputs, targets))
        uses = [replace(use, seen=tuple(islice(found, count))) for use, count in self._uses]
        return OfUses(uses, self._line.steady, self._samples)

    def _summed(self, gradients: Unwritten) -> ClippedSum:
        """Of few samples."""
        sizes = [p.numel() for p in gradients.parameters.values()]
        kind = torch.promote_types(next(iter(gradients.parameters.values())).dtype, torch.float32)
        found = Dense(gradients.columns(slice(0, sum(sizes)), kind, sum(sizes)))
        return self._CLIP.sum([found], torch.ones(found.samples, dtype=torch.float64, device=found.device))


def key(parameters: dict[str, Tensor], *rest: Any) -> Any:
    """Equal for chunks that the same trace serves."""
    leaves, form = tree_flatten(rest)
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in leaves)
    return shapes, str(form), tuple((name, p.dtype) for name, p in parameters.items())


def require_equal(mine: ClippedSum, plain: ClippedSum, exact: ClippedSum) -> None:
    """What a compiler or a kernel does to a model is trusted after it has shown the same sum as the model itself.

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
            raise UnfitError(f"the sum is off by {float(off):.2g} where {float(allowed):.2g} would be rounding")


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
