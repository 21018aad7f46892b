"""One engine for a whole run."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.errors import ModelMixError
from modelmix.training.clipping import Clip, ClippedSum
from modelmix.training.engines.choice import choose, exact, quiet
from modelmix.training.engines.chunk import Loss, check_rows, gradients_of_chunk, known, rows, sum_of_chunk
from modelmix.training.engines.compiled import (
    Compiled,
    CompiledUses,
    Reference,
    Stamps,
    UnfitError,
    key,
    require_equal,
    same_tensors,
)
from modelmix.training.engines.layers import rule_for, wide
from modelmix.training.engines.unwritten import unwritten_gradients, uses_of_chunk
from modelmix.training.gradients import Unwritten
from modelmix.training.parameters import FlatParameters
from modelmix.training.randomness import draws_apart

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_PROBE = 4


class Engine:
    """Sums the clipped gradients of chunks of one model.

    Guarantee: whatever the precision and however it is compiled, what one sample adds to the sum keeps the clip's
    bounds; norms are measured in float64 on the very numbers that are summed.

    Args:
        model: any module; its trainable parameters are what ``parameters`` names in every call.
        loss: ``loss(outputs, targets)``; it sees one sample at a time, and outputs in float32 or wider.
        probe: (inputs, targets) of some samples, by which the engine is chosen and checked.
        name: "hooks", "universal", "loop", or "auto" for the fastest that is right for this model.
        precision: in which the model is run; None takes the model's own.
        compiled: traces a chunk once, compiles it, and on a GPU replays it without launching kernels one by one. None
            does so on a GPU. A model that cannot be traced is run as it is.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        probe: tuple[Any, Any],
        *,
        name: str = "auto",
        precision: str | None = None,
        compiled: bool | None = None,
    ) -> None:
        if precision is not None and precision not in PRECISIONS:
            raise ModelMixError(f"precision = {precision!r} is unknown: choose {', '.join(PRECISIONS)}.")
        if name in ("auto", "hooks"):
            right = choose(model, loss, *probe)
            if name == "hooks" and right != "hooks":
                raise ModelMixError('the hook engine is not right for this model: use engine="auto" or "universal".')
            name = right
        self.name = known(name)
        self._original, self._loss = model, loss
        self._dtype = None if precision is None else PRECISIONS[precision]
        self._model = model if self._dtype is None else _twin(model, self._dtype)
        device = next(model.parameters()).device
        if device.type == "cuda" and self.name == "hooks":
            self._check_kernels(probe)
        self._compile = self.name != "loop" and (device.type == "cuda" if compiled is None else compiled)
        self._compiled: dict[Any, Compiled] = {}
        self._seen: dict[Any, CompiledUses | None] = {}
        self._last: tuple[Stamps, dict[str, Tensor]] | None = None
        self.fixed_shapes = self._compile or device.type != "cpu"
        """Whether chunks should all have one shape; on a processor that only costs time."""
        if self.name == "hooks":
            _say_what_is_slow(model)

    @property
    def precision(self) -> torch.dtype | None:
        """In which the model is run, where that is not its own."""
        return self._dtype

    def require_fit(self, model: nn.Module) -> None:
        """Refuses to serve a model that may differ from this engine's own in more than the values that are trained.

        What a module does beyond its parameters cannot be seen: that both come from the same builder is for the caller
        to know.
        """

        def form(model: nn.Module) -> Any:
            return repr(model), [(name, p.shape, p.dtype, p.device) for name, p in model.named_parameters()]

        fixed = any(not p.requires_grad for p in model.parameters()) or any(True for _ in model.buffers())
        if fixed or form(model) != form(self._original):
            raise ModelMixError("this engine was made for another model: leave engine out.")

    def __call__(
        self, parameters: dict[str, Tensor], inputs: Any, targets: Any, weights: Tensor, clip: Clip, copies: int = 1
    ) -> ClippedSum:
        """The clipped sum of one chunk at the given parameters; see ``sum_of_chunk``."""
        check_rows((inputs, targets), weights, copies)
        reference = self._reference(parameters, inputs, targets, copies)
        loss, inputs = self._ready(inputs)
        if self._compile and weights.shape[0]:
            form = key(parameters, inputs, targets, weights), self._modes(), clip.p == 1, clip.norm, copies
            try:
                if form not in self._compiled:
                    take = partial(gradients_of_chunk, self.name, self._model, loss, copies=copies)
                    case = (self._at_precision(parameters), inputs, targets, weights, clip, copies)
                    with self._draws_apart():
                        self._compiled[form] = Compiled(take, *case, reference)
                return self._compiled[form](parameters, inputs, targets, weights, clip)
            except UnfitError as reason:
                self._compile = False
                _say_uncompiled(reason)
        parameters = self._at_precision(parameters)
        return sum_of_chunk(self.name, self._model, loss, parameters, inputs, targets, weights, clip, copies)

    def gradients(self, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int = 1) -> Unwritten:
        """The gradients of the samples of one chunk, for who bounds them in a way of his own.

        They are written down for some parameters at a time. The next call may write over what they come from.
        """
        loss, x = self._ready(inputs)
        if self._compile and self.name == "hooks" and rows((x, targets)):
            form = key(parameters, x, targets), self._modes(), copies
            if form not in self._seen:
                try:
                    see = partial(uses_of_chunk, self._model, loss, copies=copies)
                    reference = self._reference(parameters, inputs, targets, copies)
                    with self._draws_apart():
                        self._seen[form] = CompiledUses(
                            see, self._at_precision(parameters), x, targets, copies, reference
                        )
                except UnfitError as reason:
                    # For this form alone: gradients of public samples may not hang on what private ones met.
                    self._seen[form] = None
                    _say_uncompiled(reason)
            line = self._seen[form]
            if line is not None:
                return line(parameters, x, targets)
        parameters = self._at_precision(parameters)
        return unwritten_gradients(self.name, self._model, loss, parameters, (x, targets), copies)

    def _draws_apart(self) -> AbstractContextManager[None]:
        """Trying a model out must not use up random numbers of a step: one that is resumed would draw others."""
        return draws_apart(next(self._original.parameters()).device)

    def _reference(self, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int) -> Reference:
        def reference(rows: slice, weights: Tensor, clip: Clip) -> ClippedSum:
            x, y = tree_map(lambda t: t[rows], (inputs, targets))
            if self._dtype is not None:  # samples may come in the precision of the run
                own = next(self._original.parameters()).dtype
                x = tree_map(lambda t: t.to(own) if t.dtype == self._dtype else t, x)
            with exact():
                return sum_of_chunk("universal", self._original, self._loss, parameters, x, y, weights, clip, copies)

        return reference

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._model.modules())

    def _ready(self, inputs: Any) -> tuple[Loss, Any]:
        """Loss and inputs in the precision of the run."""
        if self._dtype is None:
            return self._loss, inputs
        for mine, theirs in zip(self._model.modules(), self._original.modules(), strict=True):
            mine.training = theirs.training
        return _in_full(self._loss), tree_map(self._cast, inputs)

    def _check_kernels(self, probe: tuple[Any, Any]) -> None:
        """The last check on an accelerator, at the precision of the run, where layers are ours, against torch's own.

        The comparison by which an engine is chosen runs in float64, for which there are no kernels.
        """
        flat, device = FlatParameters(self._original), next(self._original.parameters()).device
        x, y = tree_map(lambda t: t[:_PROBE].to(device), probe)
        one, full = torch.ones(rows(x), dtype=torch.float64, device=device), flat.views(flat.read())
        here = (full, x) if self._dtype is None else tree_map(self._cast, (full, x))
        twins = [copy.deepcopy(model) for model in (self._model, self._original)]
        for twin in twins:
            quiet(twin)
        loss = self._loss if self._dtype is None else _in_full(self._loss)
        case = (twins[0], loss, *here, y, one, Clip(1.0))
        with exact():
            right = sum_of_chunk("universal", twins[1], self._loss, full, x, y, one, Clip(1.0))
        try:
            require_equal(sum_of_chunk("hooks", *case), sum_of_chunk("universal", *case), right)
        except UnfitError as reason:
            self.name = "universal"
            warnings.warn(f"our kernels are not right on this machine, please report it: {reason}", stacklevel=3)

    def _at_precision(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """In the precision of the run, cast once for all the chunks of a step. What is compiled casts as it copies."""
        if self._dtype is None:
            return parameters
        stamps = [(p, p._version) for p in parameters.values()]
        if self._last is None or not same_tensors(stamps, self._last[0]):
            self._last = stamps, {name: self._cast(p) for name, p in parameters.items()}
        return self._last[1]

    def _cast(self, t: Tensor) -> Tensor:
        return t.to(self._dtype) if t.is_floating_point() else t


def _twin(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in another precision, with what is not trained; what is trained comes with every call."""
    try:
        return copy.deepcopy(model).to(dtype)
    except Exception as error:
        raise ModelMixError("another precision needs a model that can be copied: leave precision out.") from error


def _in_full(loss: Loss) -> Loss:
    """A loss that is given its outputs in float32, where they come in less."""
    return lambda outputs, targets: loss(tree_map(wide, outputs), targets)


def _say_uncompiled(reason: UnfitError) -> None:
    warnings.warn(f"the model runs uncompiled, which is right and slower: {reason}", stacklevel=3)


def _say_what_is_slow(model: nn.Module) -> None:
    inside = {m for a in model.modules() if type(a) is nn.MultiheadAttention for m in a.modules()}
    slow = {
        type(module).__name__
        for module in model.modules()
        if module not in inside
        and any(p.requires_grad for p in module.parameters(recurse=False))
        and rule_for(module) is None
    }
    if slow:
        warnings.warn(
            f"there is no fast rule for {', '.join(sorted(slow))}: gradients of these layers are taken sample by "
            "sample, which is right and slower.",
            stacklevel=4,
        )
