"""What the laboratory adds to the kinds that recipes know by name. Nothing here imports torch before it is used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelmix import kinds
from modelmix.kinds import Arrays, NamedData, NamedFeatures, NamedNormalisation
from modelmix_lab.datasets import catalogue, cifar, svhn

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from modelmix.accounting.ledger import Ledger
    from modelmix.config.feature_spec import FeaturesConfig
    from modelmix.features.cache import Transform
    from modelmix.training.rules import Rule

Found = tuple[str, Arrays, tuple[str, ...] | None]


def register() -> None:
    """Add everything to the tables of ``modelmix.kinds``."""
    kinds.DATA.update(
        cifar10=_data("cifar10", next(iter(cifar.MD5)), _cifar10, cifar.CLASSES, (cifar.ARCHIVE,)),
        svhn=_data("svhn", svhn.FILES["train"], _svhn, svhn.CLASSES),
    )
    kinds.DATA["fashion-mnist"] = _fashion()
    kinds.FEATURES.update(
        {
            "scatter": NamedFeatures(_scatter, mirror=False, logarithm=True),
            "patches": NamedFeatures(_patches),
            "prior": NamedFeatures(_frozen, prior=True),
            "patches+prior": NamedFeatures(_both, prior=True),
        }
    )
    kinds.FEATURE_FILES[".npz"] = "prior"
    kinds.NORMALISATIONS.update(
        group=NamedNormalisation("scatter", _normalised("by_group")),
        private=NamedNormalisation("scatter", _normalised("by_private_moments")),
    )
    kinds.IMAGES.update({name: partial(_images, name) for name in ("scenes", "silhouettes", "characters")})
    kinds.MODELS["scatter-cnn"] = _scatter_cnn
    kinds.RULES["released"] = _released_rule
    kinds.STARTS.append(_start)
    kinds.ATTACKS.append(_released_bounds)


def _released_rule(model: nn.Module, embedded: bool, **fields: Any) -> Rule:
    from modelmix_lab.training.released import ReleasedRule

    return ReleasedRule.of(model, embedded, **fields)


def _data(
    name: str,
    marker: str,
    read: Callable[[Path], Found],
    classes: tuple[str, ...],
    archives: tuple[str, ...] = (),
) -> NamedData:
    return NamedData(
        title=catalogue.CATALOGUE[name].title,
        marker=marker,
        find=lambda root: catalogue.find(name, root),
        held=lambda path: catalogue.held(name, path),
        read=read,
        classes=classes,
        fetch=f"modelmix-lab data fetch {name}",
        archives=archives,
    )


def _cifar10(path: Path) -> Found:
    return "cifar10", cifar.read(path), cifar.CLASSES


def _svhn(path: Path) -> Found:
    arrays, published = svhn.read(path)
    return ("svhn" if published else "svhn (rebuilt crops)"), arrays, svhn.CLASSES


def _fashion() -> NamedData:
    from modelmix.data import fashion

    return _data("fashion-mnist", fashion.CANONICAL["x_train"], _idx, fashion.CLASSES)


def _idx(path: Path) -> Found:
    from modelmix.data.dataset import read_idx

    return read_idx(path)


def _scatter(config: FeaturesConfig, device: torch.device) -> tuple[Transform, ...]:
    from modelmix_lab.features.scattering import Scattering

    return (Scattering(device=device),)


def _patches(config: FeaturesConfig, device: torch.device) -> tuple[Transform, ...]:
    from modelmix_lab.features.patches import Patches

    return (Patches(device, config.mirror is not False),)


def _frozen(config: FeaturesConfig, device: torch.device) -> tuple[Transform, ...]:
    from modelmix_lab.features.frozen import Frozen
    from modelmix_lab.features.weights import Prior

    return (Frozen(Prior.load(config.prior or config.kind), device, config.mirror is not False),)


def _both(config: FeaturesConfig, device: torch.device) -> tuple[Transform, ...]:
    return _patches(config, device) + _frozen(config, device)


def _normalised(name: str) -> Callable[..., kinds.Normalised]:
    def apply(*arguments: Any) -> kinds.Normalised:
        from modelmix_lab.features import preparation

        done: kinds.Normalised = getattr(preparation, name)(*arguments)
        return done

    return apply


def _images(name: str, count: int, side: int, generator: torch.Generator) -> Tensor:
    from modelmix_lab.synthetic.characters import characters
    from modelmix_lab.synthetic.silhouettes import silhouettes
    from modelmix_lab.synthetic.synthetic import synthetic

    return {"scenes": synthetic, "silhouettes": silhouettes, "characters": characters}[name](count, side, generator)


def _scatter_cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    from modelmix_lab.models.scattering import scatter_cnn

    return scatter_cnn(shape, classes)


def _start(prior: str, network: nn.Module) -> None:
    from modelmix_lab.features.weights import Prior

    Prior.load(prior).start(network)


def _released_bounds(ledger: Ledger, delta: float, seed: int, quick: bool) -> list[dict[str, Any]]:
    """The two habits of the released configuration that the account does not cover, attacked in the trainer."""
    from modelmix_lab.auditing.released import audit_released

    size = {"canaries": 2000, "runs": 1} if quick else {"canaries": 10_000, "runs": 8}
    out = []
    for which, most in (("norm", 150), ("momentum", 300 if quick else 3500)):
        steps = min(ledger.steps, most)
        if which == "momentum" and not quick:
            size = {"canaries": 1000, "runs": 8}
        found = audit_released(ledger.phases[0].mechanism, delta, which, steps=steps, seed=seed, **size)
        name = "unmixed norm layers" if which == "norm" else "raw momentum"
        out.append({"what": f"{name}, {steps:,} steps", **asdict(found)})
    return out
