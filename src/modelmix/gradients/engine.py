"""One engine for a whole run: chosen and checked once, in another precision if asked, compiled where that pays."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from modelmix.errors import ModelMixError
from modelmix.gradients import selection, vmap
from modelmix.gradients.batch import Batch, Loss, PassResult
from modelmix.gradients.clip import Clip, ClippedSum
from modelmix.gradients.compiled import (
    CompilationRejected,
    CompiledLayerCalls,
    CompiledSum,
    Reference,
    Stamps,
    require_equal,
    same_tensors,
)
from modelmix.gradients.criterion import require_no_parameters, with_class_weights
from modelmix.gradients.dataflow import MeetingError
from modelmix.gradients.device import copy_in_precision, full_precision, preserve_torch_rng
from modelmix.gradients.forms import Gradients
from modelmix.gradients.independence import IndependenceProbe
from modelmix.gradients.layers import slow_layers, to_float32
from modelmix.gradients.lazy import FromLayerCalls, FromRecompute, LazyGradients
from modelmix.gradients.memory import Watch, WatchedFunction
from modelmix.gradients.parameters import FlatParameters
from modelmix.gradients.proved_pass import ProvedPass, unproved

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

_PROBE = 4
_SLOWER = "which is right and slower"


class Engine:
    """Sum the clipped gradients of batches of one model.

    Guarantee: what one sample adds to the sum is a function of that sample, the parameters and random draws alone, and
    keeps the clip's bounds, whatever the precision and however it is compiled; norms are measured in float64 on the
    very numbers that are summed. The hook engine replays a graph in which that was proved (see ``proved_pass``); the
    others run every sample alone.

    Args:
        model: any module; its trainable parameters are what ``parameters`` names in every call.
        loss: ``loss(outputs, targets)``; it sees one sample at a time, and outputs in float32 or wider.
        probe: (inputs, targets) of some samples, of which shapes and types are used and no value is.
        name: "hooks", "vmap", "loop", or "auto" for the fastest that is proved to keep samples apart and right for
            this model.
        precision: in which the model is run; None takes the model's own.
        compiled: traces a batch once, compiles it, and on a GPU replays it without launching kernels one by one. None
            does so on a GPU. A model that cannot be traced is run as it is.

    >>> import torch
    >>> from modelmix.gradients import Batch, Clip, Engine, FlatParameters
    >>> model, x, y = torch.nn.Linear(3, 2), torch.ones(4, 3), torch.tensor([0, 1, 0, 1])
    >>> engine = Engine(model, torch.nn.CrossEntropyLoss(), (x, y))
    >>> flat = FlatParameters(model)
    >>> engine.name, engine(flat.views(flat.read()), Batch(x, y), Clip(1.0)).total.shape
    ('hooks', torch.Size([8]))
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
            selection.require_known(name)
        self._original, self._loss, self._criterion = model, with_class_weights(loss), loss
        self._dtype = None if precision is None else PRECISIONS[precision]
        self._model = model if self._dtype is None else copy_in_precision(model, self._dtype)
        self._device = next(model.parameters()).device
        self._passes: dict[Any, ProvedPass | None] = {}
        self._last: tuple[Stamps, dict[str, Tensor]] | None = None
        self._remembered: tuple[Watch, WatchedFunction] | None = None
        self._alone: IndependenceProbe | None = None
        self.reason: str | None = None
        """Why the fast engine is not used; None if it is, or if another one was asked for."""
        self._probe = Batch(*tree_map(lambda t: t.to(self._device), selection.synthetic_like(probe)))
        with preserve_torch_rng(self._device):  # trying a model out must not use up random numbers of a step
            require_no_parameters(model, self._loss, self._probe.inputs, self._probe.targets)
            self.name = self._chosen(name)
        if self._device.type == "cuda" and self.name == "hooks":
            self._check_kernels(probe)
        self._compile = self.name != "loop" and (self._device.type == "cuda" if compiled is None else compiled)
        self._compiled: dict[Any, CompiledSum] = {}
        self._seen: dict[Any, CompiledLayerCalls | None] = {}
        self.fixed_shapes = self._compile or self._device.type != "cpu"
        """Whether batches should all have one shape; on a CPU that only costs time."""
        if self.name == "hooks" and (slow := slow_layers(model)):
            _say(f"there is no fast rule for {', '.join(slow)}: gradients of these layers are taken sample by sample")

    def _chosen(self, name: str) -> str:
        """Choose the engine from synthetic samples: the hook engine where it is proved and right."""
        probe, parameters = self._ready(self._probe), self._own_parameters()
        if name in vmap.ONE_BY_ONE:  # what a model makes once it makes before the first private batch
            with suppress(Exception):  # the first batch says better what is wrong
                vmap.ONE_BY_ONE[name](self._model, self._run_loss, parameters, probe.part(slice(1)))
            return name
        try:
            self._prove(self._form(parameters, probe), parameters, probe)
            self.reason = selection.find_disagreement(
                self._original, self._loss, (self._probe.inputs, self._probe.targets)
            )
        except MeetingError as reason:
            self.reason = str(reason)
        except ModelMixError as reason:  # a layer that hooks cannot follow
            self.reason = str(reason).partition("; use engine=")[0].rstrip(".")
        if self.reason is None:
            return "hooks"
        if name == "hooks":
            raise unproved(self.reason)
        found = selection.select_fallback(self._model, self._run_loss, parameters, (probe.inputs, probe.targets))
        _say(f"samples run one at a time ({found} engine)", self.reason)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """A copy traces and compiles its own model: what was traced holds on to this one's constants."""
        return vars(self) | {"_passes": {}, "_compiled": {}, "_seen": {}, "_remembered": None, "_alone": None}

    @property
    def precision(self) -> torch.dtype | None:
        """In which the model is run, where that is not its own."""
        return self._dtype

    def require_fit(self, model: nn.Module) -> None:
        """Refuse to serve a model that may differ from this engine's own in more than the values that are trained.

        What a module does beyond its parameters cannot be seen: that both come from the same builder is for the caller
        to know.
        """

        def form(model: nn.Module) -> Any:
            return repr(model), [(name, p.shape, p.dtype, p.device) for name, p in model.named_parameters()]

        fixed = any(not p.requires_grad for p in model.parameters()) or any(True for _ in model.buffers())
        if fixed or form(model) != form(self._original):
            raise ModelMixError("this engine was made for another model: leave engine out.")

    def __call__(self, parameters: dict[str, Tensor], batch: Batch, clip: Clip) -> ClippedSum:
        """Sum the clipped gradients of a batch.

        Args:
            parameters: the values to take gradients at, by name; see ``FlatParameters.views``.
        """
        ready = self._ready(batch.checked())
        if self._compile and ready.samples:
            form = self._form(parameters, ready), ready.samples, clip.p == 1, clip.norm
            try:
                if form not in self._compiled:
                    self._compiled[form] = self._compiled_sum(parameters, batch, clip)
                return self._compiled[form](parameters, ready, clip)
            except CompilationRejected as reason:
                self._compile = False
                _say("the model runs uncompiled", reason)
        return clip.sum(self._gradients(self._at_precision(parameters), ready), ready.sample_weights)

    def with_outputs(self, parameters: dict[str, Tensor], batch: Batch, clip: Clip) -> tuple[ClippedSum, Any, Tensor]:
        """Sum the clipped gradients of a batch, and give the model's outputs and losses of the same pass.

        Outputs and losses are as private as the samples.

        Returns:
            The sum; the outputs, detached and in the structure that the model gives; one loss for every row.
        """
        ready, parameters = self._ready(batch.checked()), self._at_precision(parameters)
        if not ready.samples or ready.rows_per_sample != 1:
            raise ModelMixError("outputs are given for batches of samples of one row each: leave an empty one out.")
        found = self._pass(parameters, ready, with_outputs=True)
        assert found.losses is not None
        gradients = found.in_order(parameters, ready)
        return clip.sum(gradients, ready.sample_weights), found.outputs, found.losses

    def gradients(self, parameters: dict[str, Tensor], batch: Batch) -> LazyGradients:
        """Return unclipped per-sample gradients, for callers with their own bound (gradient embedding).

        They are materialised for some parameters at a time. The next call may write over what they come from.
        """
        ready = self._ready(batch.checked())
        if self._compile and self.name == "hooks" and ready.samples:
            form = self._form(parameters, ready), ready.samples
            if form not in self._seen:
                try:
                    self._seen[form] = self._compiled_calls(parameters, batch)
                except CompilationRejected as reason:
                    # For this form alone: gradients of public samples may not hang on what private ones met.
                    self._seen[form] = None
                    _say("the model runs uncompiled", reason)
            if (compiled := self._seen[form]) is not None:
                return compiled(parameters, ready)
        parameters = self._at_precision(parameters)
        if not ready.samples:
            return FromLayerCalls([], parameters, 0)
        if (proved := self._proved(parameters, ready)) is not None:
            return FromLayerCalls(proved.calls(parameters, ready)[0], parameters, ready.samples)
        self._before_code_runs()
        watch = Watch(self._model, attributes=True, parameters=parameters)

        def check() -> None:
            watch.check()
            self.check()

        run = partial(vmap.ONE_BY_ONE[self._one_by_one], self._model, self._run_loss)
        return FromRecompute(run, parameters, ready, check)

    def _gradients(self, parameters: dict[str, Tensor], batch: Batch) -> list[Gradients]:
        """Compute the gradient of every sample for every parameter, in order."""
        found = self._pass(parameters, batch) if batch.samples else PassResult({})
        return found.in_order(parameters, batch)

    def _pass(self, parameters: dict[str, Tensor], batch: Batch, with_outputs: bool = False) -> PassResult:
        """Run the proved pass, or the samples one by one where there is none."""
        if (proved := self._proved(parameters, batch)) is not None:
            return proved.gradients(parameters, batch)
        self._before_code_runs()
        watch, run = Watch(self._model, parameters=parameters), vmap.ONE_BY_ONE[self._one_by_one]
        found = run(self._model, self._run_loss, parameters, batch, with_outputs=with_outputs)
        watch.check()
        self.check()
        return found

    def _proved(self, parameters: dict[str, Tensor], batch: Batch) -> ProvedPass | None:
        """Find the pass that hooks replay; None where another engine runs, or has to for batches of this form."""
        if self.name != "hooks":
            return None
        form = self._form(parameters, batch)
        if form not in self._passes:
            try:
                with preserve_torch_rng(self._device):  # a step that is resumed would draw others
                    self._prove(form, parameters, batch)
            except (MeetingError, ModelMixError) as reason:
                _say("samples of this shape run one at a time", reason)
        return self._passes.get(form)

    def _prove(self, form: Any, parameters: dict[str, Tensor], batch: Batch) -> None:
        """Make the proved pass for batches of this form; None if it cannot be proved."""
        self.check()
        self._passes[form] = None
        self._passes[form] = ProvedPass(self._model, self._run_loss, parameters, batch)

    def _form(self, parameters: dict[str, Tensor], batch: Batch) -> Any:
        """What is equal for batches of one form, in the same modes and with parameters of the same types."""
        kinds = tuple([(name, p.dtype, p.device) for name, p in parameters.items()])
        return kinds, tuple([module.training for module in self._model.modules()]), batch.form

    def remember(self) -> None:
        """Remember, once, what the code of model and criterion can reach in Python; every pass that runs it compares.

        What a loop, a dataset or an augmentation writes there between two passes would reach all samples. Call it
        before the first sample is seen.
        """
        self._take_on_modes()
        if self._remembered is None:
            if self.name != "hooks":
                self._alone = self._independence_probe()  # first: what is made once is made by then
            criterion = WatchedFunction(self._criterion, "the criterion", self._model)
            self._remembered = Watch(self._model, attributes=True), criterion

    def check(self) -> None:
        """Refuse what the code of model or criterion has kept since ``remember``: something of a sample, perhaps."""
        for watch in self._remembered or ():
            watch.check()
        if self._alone is not None:
            self._alone.check()

    def _before_code_runs(self) -> None:
        """Check before the model's own code is given private samples, rather than a graph of it that was proved."""
        self.remember()
        self.check()
        if self._alone is None:  # of a batch whose form is not proved
            self._alone = self._independence_probe()

    @property
    def _one_by_one(self) -> str:
        """The engine in which samples cannot meet, for what is not proved."""
        return "vmap" if self.name == "hooks" else self.name

    def _independence_probe(self) -> IndependenceProbe:
        parameters = {name: p.clone() for name, p in self._own_parameters().items()}
        run = vmap.ONE_BY_ONE[self._one_by_one]

        def of(kind: str) -> dict[str, Gradients]:
            first = selection.synthetic_batch(self._probe.part(slice(1)), kind)
            return run(self._model, self._run_loss, parameters, self._ready(first)).gradients

        return IndependenceProbe([partial(of, kind) for kind in ("normal", "uniform")], self._device)

    def _compiled_sum(self, parameters: dict[str, Tensor], batch: Batch, clip: Clip) -> CompiledSum:
        """Compile for the shapes of a batch, and check with synthetic samples: no private value decides anything."""
        batch = selection.synthetic_batch(batch)
        ready = self._ready(batch)
        with preserve_torch_rng(self._device):
            case = self._at_precision(parameters), ready, clip
            return CompiledSum(self._gradients, *case, self._reference(parameters, batch))

    def _compiled_calls(self, parameters: dict[str, Tensor], batch: Batch) -> CompiledLayerCalls | None:
        batch = selection.synthetic_batch(batch)
        ready, here = self._ready(batch), self._at_precision(parameters)
        proved = self._proved(here, ready)
        if proved is None:
            return None
        with preserve_torch_rng(self._device):
            return CompiledLayerCalls(
                lambda *chunk: proved.calls(*chunk)[0], here, ready, self._reference(parameters, batch)
            )

    def _reference(self, parameters: dict[str, Tensor], batch: Batch) -> Reference:
        def reference(count: int, clip: Clip) -> ClippedSum:
            few = batch.part(slice(count))
            if self._dtype is not None:  # samples may come in the precision of the run
                own = next(self._original.parameters()).dtype
                few = few.map(lambda t: t.to(own) if t.dtype == self._dtype else t, inputs_only=True)
            with full_precision():
                return selection.sum_of_chunk("vmap", self._original, self._loss, parameters, few, clip)

        return reference

    @property
    def _run_loss(self) -> Loss:
        """The loss as it is run: given outputs in float32, where they come in less."""
        if self._dtype is None:
            return self._loss
        own = self._loss
        return lambda outputs, targets: own(tree_map(to_float32, outputs), targets)

    def _ready(self, batch: Batch) -> Batch:
        """Bring a batch to the precision of the run, and cut it loose from whatever graph it is part of."""
        if self._dtype is None:
            return batch.map(Tensor.detach)
        self._take_on_modes()
        return batch.map(Tensor.detach).map(self._cast, inputs_only=True)

    def _take_on_modes(self) -> None:
        """Put a twin in another precision into the modes of the model."""
        if self._dtype is not None:
            for mine, theirs in zip(self._model.modules(), self._original.modules(), strict=True):
                mine.training = theirs.training

    def _check_kernels(self, probe: tuple[Any, Any]) -> None:
        """Check on a GPU, at the precision of the run, layers that are ours against torch's own.

        The comparison by which an engine is chosen runs in float64, for which there are no kernels.
        """
        flat, batch = (
            FlatParameters(self._original),
            Batch(*selection.synthetic_like(probe, count=_PROBE, device=self._device)),
        )
        full = flat.views(flat.read())
        twins = [copy.deepcopy(model) for model in (self._model, self._original)]
        for twin in twins:
            selection.disable_dropout(twin)
        case = (twins[0], self._run_loss, self._at_precision(full), self._ready(batch), Clip(1.0))
        with full_precision():
            right = selection.sum_of_chunk("vmap", twins[1], self._loss, full, batch, Clip(1.0))
        try:
            require_equal(selection.sum_of_chunk("hooks", *case), selection.sum_of_chunk("vmap", *case), right)
        except CompilationRejected as reason:
            self.name = "vmap"
            warnings.warn(f"our kernels are not right on this machine, please report it: {reason}", stacklevel=3)

    def _own_parameters(self) -> dict[str, Tensor]:
        """The model's present values, in the precision of the run."""
        own = FlatParameters(self._original)
        return self._at_precision(own.views(own.read()))

    def _at_precision(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cast to the precision of the run, once for all batches of a step. What is compiled casts as it copies."""
        if self._dtype is None:
            return parameters
        stamps = [(p, p._version) for p in parameters.values()]
        if self._last is None or not same_tensors(stamps, self._last[0]):
            self._last = stamps, {name: self._cast(p) for name, p in parameters.items()}
        return self._last[1]

    def _cast(self, t: Tensor) -> Tensor:
        return t.to(self._dtype) if t.is_floating_point() else t


def _say(what: str, reason: object = None) -> None:
    warnings.warn(f"{what}, {_SLOWER}{'.' if reason is None else f': {reason}'}", stacklevel=5)
