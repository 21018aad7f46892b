"""The networks on scattering features: their sizes, and that samples do not meet in them."""

from __future__ import annotations

import pytest
import torch

from modelmix.errors import ModelMixError
from modelmix.models import build
from modelmix_lab.models.scattering import scatter_cnn_cifar, scatter_cnn_grey

NETWORKS = {"cifar": (scatter_cnn_cifar, (243, 8, 8), 187_210), "grey": (scatter_cnn_grey, (81, 7, 7), 33_066)}


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


def test_the_network_is_built_by_name_for_the_features_it_fits():
    assert sum(p.numel() for p in build("scatter-cnn", (81, 7, 7), 10).parameters()) == 33_066
    with pytest.raises(ModelMixError, match="takes features 243 x 8 x 8 or 81 x 7 x 7"):
        build("scatter-cnn", (1, 28, 28), 10)
