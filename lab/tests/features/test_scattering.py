"""The scattering transform against kymatio, where it is installed, and against numbers that kymatio computed."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

import modelmix as mm
from modelmix import data
from modelmix.features import cached
from modelmix_lab.features.scattering import Scattering, pixels

needs_kymatio = pytest.mark.skipif(importlib.util.find_spec("kymatio") is None, reason="kymatio is not installed")

# Features of `formula`, as (colours, side, map, row, column), computed with kymatio 0.3.0.
REFERENCE = {
    (3, 32, 0, 0, 0): -1.870879,
    (3, 32, 3, 2, 5): 0.625454,
    (3, 32, 12, 6, 1): 0.1192408,
    (3, 32, 17, 3, 3): 0.01414179,
    (3, 32, 44, 0, 6): 0.05869991,
    (3, 32, 80, 5, 2): 0.01116993,
    (3, 32, 100, 7, 7): 0.01214527,
    (3, 32, 161, 1, 4): 0.006020897,
    (3, 32, 242, 4, 0): 0.005370275,
    (1, 28, 0, 0, 0): 0.05647516,
    (1, 28, 3, 2, 5): 0.1431576,
    (1, 28, 12, 6, 1): 0.02845224,
    (1, 28, 17, 3, 3): 0.003237433,
    (1, 28, 44, 0, 6): 0.01250911,
    (1, 28, 80, 5, 2): 0.00279446,
}
NORMS = {(3, 32): 14.10177288723082, (1, 28): 3.665083223461097}


def formula(colours: int, side: int) -> torch.Tensor:
    c, i, j = torch.meshgrid(torch.arange(colours), torch.arange(side), torch.arange(side), indexing="ij")
    return ((37 * c + 3 * i * i + 5 * i * j + 11 * j) // (2 + c) % 256).to(torch.uint8)[None]


def random_images(*shape: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator, device="cpu")


def natural_images(colours: int) -> torch.Tensor:
    """Clothes at 28 x 28; for colours three of them, one over the other, in a frame of 2 pixels."""
    grey = data.load().train.x[:60]
    return grey if colours == 1 else torch.nn.functional.pad(grey.view(20, 3, 28, 28), (2, 2, 2, 2))


@pytest.mark.parametrize(("colours", "side"), NORMS)
def test_numbers_of_kymatio(colours, side):
    found = Scattering()(formula(colours, side))[0].cpu()
    for (c, s, *place), value in REFERENCE.items():
        if (c, s) == (colours, side):
            assert found[tuple(place)].item() == pytest.approx(value, rel=1e-5)
    assert found.double().norm().item() == pytest.approx(NORMS[colours, side], rel=1e-6)


@needs_kymatio
@pytest.mark.parametrize(
    "images",
    [random_images(20, 3, 32, 32), random_images(20, 1, 28, 28), random_images(4, 1, 12, 20), natural_images(1),
     natural_images(3)],
    ids=["random 32", "random 28", "oblong", "natural 28", "natural 32"],
)  # fmt: skip
def test_agrees_with_kymatio_on_every_map(images):
    # Not through kymatio.torch: version 0.3.0 then wants a function that scipy 1.17 no longer has.
    from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D

    own = Scattering(device="cpu")(images)
    theirs = ScatteringTorch2D(J=2, shape=tuple(images.shape[2:]), L=8)(pixels(images).flatten(0, 1)).view_as(own)
    error, scale = (own - theirs).abs().amax((0, 2, 3)), theirs.abs().amax((0, 2, 3))
    assert (error <= 1e-5 * scale).all()


@pytest.mark.parametrize(("shape", "expected"), [((2, 3, 32, 32), (2, 243, 8, 8)), ((2, 1, 28, 28), (2, 81, 7, 7))])
def test_shapes(shape, expected):
    images = random_images(*shape)
    found = Scattering()(images)
    assert found.shape == expected == Scattering().shape(images)
    assert found.dtype == torch.float32


def test_an_image_does_not_see_the_others():
    images = random_images(70, 3, 32, 32)  # more than two batches
    together = Scattering()(images)
    for i in (0, 31, 32, 69):
        assert torch.allclose(together[i], Scattering()(images[i : i + 1])[0], rtol=0, atol=1e-5)


def test_a_constant_image_has_only_an_average():
    """Wavelets have mean zero; the low-pass filter has sum 1, up to the digits of kymatio's pi."""
    found = Scattering()(torch.full((1, 1, 28, 28), 255, dtype=torch.uint8))[0]
    assert torch.allclose(found[0], torch.tensor(math.pi / 3.1415, device=found.device), atol=1e-4)
    assert found[1:].abs().max() < 1e-6


def test_higher_orders_ignore_brightness_and_scale_with_contrast():
    x = random_images(1, 1, 28, 28) // 4
    plain, brighter, doubled = (Scattering()(v)[0] for v in (x, x + 100, 2 * x))
    assert torch.allclose(brighter[1:], plain[1:], atol=1e-5)
    assert torch.allclose(doubled, 2 * plain, atol=1e-5)


def test_a_transposed_image_has_its_angles_exchanged():
    """Wavelet a is at (3 - a) * 22.5 degrees from the first axis, so exchanging the axes takes a to 2 - a, modulo 8."""
    x = formula(1, 28)
    found, exchanged = Scattering()(torch.cat([x, x.transpose(2, 3)]))
    angle = [(2 - a) % 8 for a in range(8)]
    order = [0, *(1 + a for a in angle), *(9 + a for a in angle), *(17 + 8 * a + b for a in angle for b in angle)]
    assert torch.allclose(exchanged[order].transpose(1, 2), found, atol=1e-6)
    assert not torch.allclose(exchanged.transpose(1, 2), found, atol=1e-2)


def test_pixels():
    black = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert pixels(black)[0, :, 0, 0].tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    assert pixels(black[:, :1] + 255).unique().tolist() == [1.0]


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(1, 1, 28, 28),
        torch.zeros(1, 2, 28, 28, dtype=torch.uint8),
        torch.zeros(28, 28, dtype=torch.uint8),
        torch.zeros(1, 1, 30, 28, dtype=torch.uint8),
        torch.zeros(1, 1, 4, 28, dtype=torch.uint8),
        torch.zeros(0, 1, 28, 28, dtype=torch.uint8),
    ],
    ids=["float", "two colours", "one image", "30 x 28", "4 x 28", "none"],
)
def test_refuses_in_one_line(images):
    with pytest.raises(mm.ModelMixError) as error:
        Scattering()(images)
    assert "\n" not in str(error.value)


def test_scattering_through_the_cache(tmp_path):
    images = torch.arange(5 * 1 * 8 * 8, dtype=torch.int64).remainder(251).to(torch.uint8).view(5, 1, 8, 8)
    assert torch.equal(cached(Scattering(device="cpu"), images, folder=tmp_path), Scattering(device="cpu")(images))
