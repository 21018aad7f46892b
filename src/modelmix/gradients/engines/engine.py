"""One engine for a whole run."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients.clipping import Clip, ClippedSum
from modelmix.gradients.engines import universal
from modelmix.gradients.engines.alone import SampleAlone
from modelmix.gradients.engines.choice import disagreement, exact, quiet, slower, synthetic
from modelmix.gradients.engines.chunk import ENGINES, Loss, check_rows, detached, known, rows, sum_of_chunk, unchanged
from modelmix.gradients.engines.compiled import (
    Compiled,
    CompiledUses,
    Reference,
    Stamps,
    UnfitError,
    key,
    require_equal,
    same_tensors,
)
from modelmix.gradients.engines.criterion import require_no_parameters, with_class_weights
from modelmix.gradients.engines.independence import MeetingError
from modelmix.gradients.engines.layers import rule_for, wide
from modelmix.gradients.engines.trace import ProvedPass, unproved
from modelmix.gradients.engines.unwritten import OfPasses, OfUses
from modelmix.gradients.gradients import Dense, Gradients, Unwritten
from modelmix.gradients.memory import Watch, WatchedFunction
from modelmix.gradients.parameters import FlatParameters
from modelmix.gradients.torch_rng import draws_apart

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_PROBE = 4


class Engine:
    """Sums the clipped gradients of chunks of one model.

    Guarantee: what one sample adds to the sum is a function of that sample, the parameters and random draws alone, and
    keeps the clip's bounds, whatever the precision and however it is compiled; norms are measured in float64 on the
    very numbers that are summed. The hook engine replays a graph in which that was proved (see ``trace``); the others
    run every sample alone.

    Args:
        model: any module; its trainable parameters are what ``parameters`` names in every call.
        loss: ``loss(outputs, targets)``; it sees one sample at a time, and outputs in float32 or wider.
        probe: (inputs, targets) of some samples, of which shapes and types are used and no value is.
        name: "hooks", "universal", "loop", or "auto" for the fastest that is proved to keep samples apart and right for
            this model.
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
        if name != "auto":
            known(name)
        self._original, self._loss, self._criterion = model, with_class_weights(loss), loss
        self._dtype = None if precision is None else PRECISIONS[precision]
        self._model = model if self._dtype is None else _twin(model, self._dtype)
        device = next(model.parameters()).device
        self._passes: dict[Any, ProvedPass | None] = {}
        self._last: tuple[Stamps, dict[str, Tensor]] | None = None
        self._remembered: tuple[Watch, WatchedFunction] | None = None
        self._alone: SampleAlone | None = None
        self.reason: str | None = None
        """Why the fast engine is not used; None if it is, or if another one was asked for."""
        self._probe = tree_map(lambda t: t.to(device), synthetic(probe))
        with self._draws_apart():
            require_no_parameters(model, self._loss, *self._probe)
        self.name = self._chosen(name, self._probe)
        if device.type == "cuda" and self.name == "hooks":
            self._check_kernels(probe)
        self._compile = self.name != "loop" and (device.type == "cuda" if compiled is None else compiled)
        self._compiled: dict[Any, Compiled] = {}
        self._seen: dict[Any, CompiledUses | None] = {}
        self.fixed_shapes = self._compile or device.type != "cpu"
        """Whether chunks should all have one shape; on a processor that only costs time."""
        if self.name == "hooks":
            _say_what_is_slow(model)

    def _chosen(self, name: str, probe: tuple[Any, Any]) -> str:
        """The engine to use, from synthetic samples: the hook engine where it is proved and right."""
        own, fixed = FlatParameters(self._original), name in ("universal", "loop")
        if fixed:
            self._fill_caches(name, own, probe)
            return name
        with self._draws_apart():
            loss, inputs = self._ready(probe[0])
            parameters = self._at_precision(own.views(own.read()))
            try:
                self._pass_for(parameters, inputs, probe[1], 1, loss)
                self.reason = disagreement(self._original, self._loss, probe)
            except MeetingError as reason:
                self.reason = str(reason)
            except ModelMixError as reason:  # a layer that hooks cannot follow
                self.reason = str(reason).partition("; use engine=")[0].rstrip(".")
            if self.reason is None:
                return "hooks"
            if name == "hooks":
                raise unproved(self.reason)
            found = slower(self._model, loss, parameters, (inputs, probe[1]))
        warnings.warn(
            f"samples run one at a time ({found} engine), which is right and slower: {self.reason}", stacklevel=4
        )
        return found

    def _fill_caches(self, name: str, own: FlatParameters, probe: tuple[Any, Any]) -> None:
        """Let a model make what it makes once, from samples that are nobody's, before the first private chunk."""
        with self._draws_apart(), suppress(Exception):  # the first chunk says better what is wrong
            loss, inputs = self._ready(probe[0])
            parameters = self._at_precision(own.views(own.read()))
            x, y = tree_map(lambda t: t[:1], (inputs, probe[1]))
            ENGINES[name](self._model, loss, parameters, x, y, 1)

    def _pass_for(
        self, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int, loss: Loss
    ) -> ProvedPass | None:
        """The proved pass for chunks of this form; None if it was tried before and could not be proved."""
        leaves, form = tree_flatten((inputs, targets))
        shapes = tuple((tuple(t.shape[1:]), t.dtype, t.device) for t in leaves)
        kinds = tuple((name, p.dtype, p.device) for name, p in parameters.items())
        found = (shapes, str(form), kinds, self._modes(), copies)
        if found not in self._passes:
            self._require_unchanged()
            self._passes[found] = None
            self._passes[found] = ProvedPass(self._model, loss, parameters, inputs, targets, copies)
        return self._passes[found]

    def __getstate__(self) -> dict[str, Any]:
        """A copy traces and compiles its own model: what was traced holds on to this one's constants."""
        return vars(self) | {"_passes": {}, "_compiled": {}, "_seen": {}, "_remembered": None, "_alone": None}

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
        loss, x = self._ready(inputs)
        if self._compile and weights.shape[0]:
            form = key(parameters, x, targets, weights), self._modes(), clip.p == 1, clip.norm, copies
            try:
                if form not in self._compiled:
                    self._compiled[form] = self._compiled_sum(parameters, (inputs, targets), weights, clip, copies)
                return self._compiled[form](parameters, x, targets, weights, clip)
            except UnfitError as reason:
                self._compile = False
                _say_uncompiled(reason)
        parameters = self._at_precision(parameters)
        return clip.sum(self._gradients(parameters, x, targets, copies, loss), weights)

    def with_outputs(
        self, parameters: dict[str, Tensor], inputs: Any, targets: Any, weights: Tensor, clip: Clip
    ) -> tuple[ClippedSum, Any, Tensor]:
        """The clipped sum of one chunk, the model's outputs and the loss of every row, all of one pass.

        Outputs and losses are as private as the samples.

        Returns:
            The sum; the outputs, detached and in the structure that the model gives; one loss for every row.
        """
        check_rows((inputs, targets), weights, 1)
        if not weights.shape[0]:
            raise ModelMixError("a chunk without samples has no outputs: leave it out.")
        loss, x = self._ready(inputs)
        kept: universal.Kept = []
        gradients = self._gradients(self._at_precision(parameters), x, targets, 1, loss, kept)
        return clip.sum(gradients, weights), *kept[0]

    def gradients(self, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int = 1) -> Unwritten:
        """Return unclipped per-sample gradients, for callers with a bound of their own (gradient embedding).

        They are written down for some parameters at a time. The next call may write over what they come from.
        """
        loss, x = self._ready(inputs)
        if self._compile and self.name == "hooks" and rows((x, targets)):
            form = key(parameters, x, targets), self._modes(), copies
            if form not in self._seen:
                try:
                    self._seen[form] = self._compiled_uses(parameters, (inputs, targets), copies)
                except UnfitError as reason:
                    # For this form alone: gradients of public samples may not hang on what private ones met.
                    self._seen[form] = None
                    _say_uncompiled(reason)
            line = self._seen[form]
            if line is not None:
                return line(parameters, x, targets)
        parameters, samples = self._at_precision(parameters), rows((x, targets)) // copies
        proved = self._proved(parameters, x, targets, copies, loss) if samples else None
        if proved is None and samples:
            self._before_code_runs()
            watch = Watch(self._model, attributes=True, parameters=parameters)

            def check() -> None:
                watch.check()
                self._require_unchanged()

            return OfPasses(self._one_by_one, self._model, loss, parameters, (x, targets), copies, check)
        uses = proved.uses(parameters, *detached(x, targets))[0] if proved is not None else []
        return OfUses(uses, parameters, samples)

    def _proved(
        self, parameters: dict[str, Tensor], inputs: Any, targets: Any, copies: int, loss: Loss
    ) -> ProvedPass | None:
        """The pass that hooks replay; None where another engine runs, or has to for chunks of this form."""
        if self.name != "hooks":
            return None
        try:
            with self._draws_apart():
                return self._pass_for(parameters, inputs, targets, copies, loss)
        except (MeetingError, ModelMixError) as reason:
            warnings.warn(f"samples of this shape run one at a time, which is right and slower: {reason}", stacklevel=4)
            return None

    def _gradients(
        self,
        parameters: dict[str, Tensor],
        inputs: Any,
        targets: Any,
        copies: int,
        loss: Loss,
        kept: universal.Kept | None = None,
    ) -> list[Gradients]:
        """The gradient of every sample for every parameter, in order."""
        m = rows((inputs, targets)) // copies
        proved = self._proved(parameters, inputs, targets, copies, loss) if m else None
        if not m:
            found: dict[str, Gradients] = {}
        elif proved is not None:
            found, *rest = proved.gradients(parameters, *detached(inputs, targets))
            if kept is not None:
                kept.append((rest[0], rest[1]))
        else:
            self._before_code_runs()
            watch, run = Watch(self._model, parameters=parameters), ENGINES[self._one_by_one]
            with unchanged(parameters):
                found = run(self._model, loss, parameters, *detached(inputs, targets), copies, kept=kept)
            watch.check()
            self._require_unchanged()
        return [found[n] if n in found else Dense(p.new_zeros(m, *p.shape)) for n, p in parameters.items()]

    def remember(self) -> None:
        """Remember, once, what the code of model and criterion can reach in Python; every pass that runs it compares.

        What a loop, a dataset or an augmentation writes there between two passes would reach all samples. Call it
        before the first sample is seen.
        """
        self._ready(())  # a twin in another precision takes on the modes
        if self._remembered is None:
            if self.name != "hooks":
                self._alone = self._sample_alone()  # first: what is made once is made by then
            criterion = WatchedFunction(self._criterion, "the criterion", self._model)
            self._remembered = Watch(self._model, attributes=True), criterion

    def _require_unchanged(self) -> None:
        """Refuse to run the code of model or criterion after something of a sample may have reached it."""
        for watch in self._remembered or ():
            watch.check()
        if self._alone is not None:
            self._alone.check()

    def _before_code_runs(self) -> None:
        """Before the model's own code is given private samples, rather than a graph of it that was proved."""
        self.remember()
        self._require_unchanged()
        if self._alone is None:  # of a chunk whose form is not proved
            self._alone = self._sample_alone()

    @property
    def _one_by_one(self) -> str:
        """The engine in which samples cannot meet, for what is not proved."""
        return "universal" if self.name == "hooks" else self.name

    def _sample_alone(self) -> SampleAlone:
        own = FlatParameters(self._original)
        run, (loss, _) = ENGINES[self._one_by_one], self._ready(self._probe[0])
        parameters = {name: p.clone() for name, p in self._at_precision(own.views(own.read())).items()}

        def of(kind: str) -> dict[str, Gradients]:
            inputs, targets = synthetic(tree_map(lambda t: t[:1], self._probe), kind)
            return run(self._model, loss, parameters, self._ready(inputs)[1], targets, 1)

        return SampleAlone(
            [partial(of, kind) for kind in ("normal", "uniform")], next(iter(parameters.values())).device
        )

    def check(self) -> None:
        """Refuse what the code of model or criterion has kept since ``remember``."""
        self._require_unchanged()

    def _compiled_sum(
        self, parameters: dict[str, Tensor], batch: tuple[Any, Any], weights: Tensor, clip: Clip, copies: int
    ) -> Compiled:
        """Compile for the shapes of a chunk, and check with synthetic samples: no private value decides anything."""
        inputs, targets = synthetic(batch)
        reference = self._reference(parameters, inputs, targets, copies)
        loss, x = self._ready(inputs)
        take = partial(self._gradients, copies=copies, loss=loss)
        with self._draws_apart():
            case = (self._at_precision(parameters), x, targets, weights, clip, copies)
            return Compiled(take, *case, reference)

    def _compiled_uses(self, parameters: dict[str, Tensor], batch: tuple[Any, Any], copies: int) -> CompiledUses | None:
        inputs, targets = synthetic(batch)
        reference = self._reference(parameters, inputs, targets, copies)
        loss, x = self._ready(inputs)
        parameters = self._at_precision(parameters)
        proved = self._proved(parameters, x, targets, copies, loss)
        if proved is None:
            return None
        with self._draws_apart():
            return CompiledUses(lambda *chunk: proved.uses(*chunk)[0], parameters, x, targets, copies, reference)

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
        x, y = synthetic(probe, count=_PROBE, device=device)
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
