"""Networks of the literature: their sizes, and that samples do not meet in them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from modelmix.models.residual import ResNet20, StandardisedConv2d, WideResNet16

NETWORKS = {
    "resnet20": (ResNet20, (3, 32, 32), 269_722),
    "wrn-16-4": (WideResNet16, (3, 32, 32), 2_753_402),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_sizes_and_samples_that_do_not_meet(name):
    make, shape, parameters = NETWORKS[name]
    torch.manual_seed(0)
    model = make()
    assert sum(p.numel() for p in model.parameters()) == parameters
    x = torch.randn(3, *shape)
    together = model(x)
    assert together.shape == (3, 10)
    torch.testing.assert_close(model(x[1:2]), together[1:2], rtol=1e-3, atol=1e-4)


def test_a_standardised_kernel_has_no_mean_and_a_fixed_size():
    torch.manual_seed(0)
    layer = StandardisedConv2d(5, 4, 3, padding=1)
    torch.nn.init.normal_(layer.weight, 3.0, 2.0)
    torch.nn.init.uniform_(layer.gain)
    used = layer.used_weight(layer.weight, layer.gain)
    torch.testing.assert_close(used.sum((1, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(used.square().sum((1, 2, 3)), layer.gain**2, rtol=1e-3, atol=0)
    x = torch.randn(2, 5, 6, 6)
    torch.testing.assert_close(layer(x), F.conv2d(x, used, layer.bias, padding=1))
