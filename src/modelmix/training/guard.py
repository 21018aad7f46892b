"""What a model must not do for an epsilon to be true. Every refusal names the rule, the reason and the way out."""

from __future__ import annotations

from torch import Tensor, nn

from modelmix.accounting.embedding import EmbeddingMechanism
from modelmix.accounting.mechanism import Mechanism
from modelmix.errors import ModelMixError, UnprovedError

ALONE = "a sample's gradient depends on that sample and the released state alone"
FIXED = "whatever is not trained stays as it was"
SAME_SET = "the coordinates trained are the ones that are noised, mixed and accounted for"


def check_model(model: nn.Module) -> None:
    """Refuses layers that let samples meet or that keep statistics of the data."""
    for name, module in model.named_modules():
        where = name or "the model"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            trained = any(p.requires_grad for p in module.parameters())
            if module.training or trained or not module.track_running_stats:
                raise UnprovedError(
                    ALONE,
                    f"{where} is a {type(module).__name__}: it mixes the samples of a batch.",
                    "Use GroupNorm or LayerNorm; a pretrained one may stay if it is frozen and in eval mode.",
                )
        elif isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
            raise UnprovedError(
                ALONE,
                f"{where} keeps running statistics of the training data without noise.",
                "Use track_running_stats=False.",
            )


def check_mechanism(mechanism: Mechanism, coordinates: int, embedded: bool = False) -> None:
    """Refuses an account that counts on fewer coordinates than are trained, or on a law that cannot be re-checked.

    Args:
        embedded: whether steps embed gradients, which their account must know.
    """
    if not isinstance(mechanism, Mechanism):
        raise ModelMixError(f"{mechanism!r} is not a Mechanism: make one with mm.Mechanism or mm.calibrate.")
    if embedded != isinstance(mechanism, EmbeddingMechanism):
        raise UnprovedError(
            "a step runs the mechanism that its ledger line names",
            "an embedded step releases two sums, and its mechanism counts on one."
            if embedded
            else "the mechanism counts on embedded gradients, and a step would not embed them.",
            "EmbeddingMechanism goes with Trainer(..., embedding=...), and every other mechanism without.",
        )
    mechanism.as_dict()  # only named laws can be written to a ledger
    if mechanism.dimension is not None and mechanism.dimension < min(coordinates, mechanism.p):
        raise UnprovedError(
            SAME_SET,
            f"the mechanism counts on {mechanism.dimension} coordinates and the model trains {coordinates}.",
            f"Leave dimension out, or set it to {coordinates}.",
        )


class Watch:
    """Remembers what may not change during training and complains when it did."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        self._fixed = self._versions()

    def _versions(self) -> dict[str, tuple[int, int]]:
        def stamp(t: Tensor) -> tuple[int, int]:
            return t.data_ptr(), t._version

        fixed = {name: stamp(p) for name, p in self._model.named_parameters() if name not in self._trained}
        return fixed | {name: stamp(b) for name, b in self._model.named_buffers()}

    def check(self) -> None:
        now = {name for name, p in self._model.named_parameters() if p.requires_grad}
        if now != self._trained:
            odd = sorted(now ^ self._trained)[0]
            raise UnprovedError(
                SAME_SET,
                f"{odd} was {'unfrozen or added' if odd in now else 'frozen or removed'} after training began.",
                "Decide what is trained before making the trainer; begin a new run for another choice.",
            )
        versions = self._versions()
        for name in sorted(set(versions) ^ set(self._fixed)) or sorted(versions):
            if versions.get(name) != self._fixed.get(name):
                raise UnprovedError(
                    FIXED,
                    f"{name} is not trained and yet was changed during training.",
                    "Keep buffers and frozen parameters as they are; statistics of private data cost budget.",
                )
