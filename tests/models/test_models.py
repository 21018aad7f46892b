"""Networks: sizes, shapes, that samples do not meet in them, and networks named by their users."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from modelmix.errors import ModelMixError
from modelmix.models import NAMES, build, cnn, linear, mlp


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def refused(*arguments) -> str:
    with pytest.raises(ModelMixError) as error:
        build(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes a module into the current folder, unknown to Python before; gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)

    def write(text: str) -> str:
        sys.modules.pop("own_networks", None)
        (tmp_path / "own_networks.py").write_text(text, encoding="utf-8")
        return "own_networks"

    yield write
    sys.modules.pop("own_networks", None)


def test_the_parameter_counts_of_the_docstrings():
    assert parameters(cnn(1, 28, 10)) == 26_010
    assert parameters(cnn(3, 32, 10)) == 37_274
    assert parameters(linear(28 * 28, 10)) == 7_850
    assert parameters(mlp(28 * 28, 10)) == 101_770


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [*range(8, 19), 28, 32, 45, (8, 40), (13, 14), (29, 28)])
def test_the_cnn_fits_every_size(channels, size):
    height, width = (size, size) if isinstance(size, int) else size
    scores = cnn(channels, size, 7)(torch.zeros(2, channels, height, width))
    assert scores.shape == (2, 7)


def test_the_cnn_of_28_by_28_has_the_common_layers():
    shapes, x = [], torch.zeros(1, 1, 28, 28)
    for layer in cnn(1, (28, 28), 10):
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert [shape for shape in shapes if len(shape) == 3][::3] == [(16, 14, 14), (32, 5, 5)]
    assert shapes[-4:] == [(512,), (32,), (32,), (10,)]


@pytest.mark.parametrize("name", NAMES)
def test_samples_do_not_meet_in_a_network(name):
    """The score of one sample has no gradient in another, in training mode too; nothing is kept between calls."""
    shape = (81, 7, 7) if name == "scatter-cnn" else (3, 12, 10)
    model = build(name, shape, 4).train()
    assert not list(model.buffers())
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x)[2].sum(), x)
    assert gradient[2].abs().sum() > 0
    assert gradient[[0, 1, 3, 4]].abs().sum() == 0


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_features_are_taken_as_they_are(name):
    assert build(name, (6,), 3)(torch.zeros(2, 6)).shape == (2, 3)


def test_the_shape_of_a_tensor_will_do():
    x = torch.zeros(2, 1, 28, 28)
    assert build("cnn", x.shape[1:], 10)(x).shape == (2, 10)


def test_a_network_of_ones_own_from_the_current_folder(own):
    path = list(sys.path)
    module = own("from torch import nn\ndef tiny(shape, classes):\n    return nn.Linear(shape[0], classes)\n")
    model = build(f"{module}:tiny", (4,), 3)
    assert isinstance(model, nn.Linear)
    assert model.weight.shape == (3, 4)
    assert sys.path == path


def test_the_current_folder_comes_first(own, tmp_path, monkeypatch):
    other = tmp_path / "installed"
    other.mkdir()
    (other / "own_networks.py").write_text("raise RuntimeError('the wrong one')\n")
    monkeypatch.syspath_prepend(other)
    module = own("from torch import nn\ndef tiny(shape, classes):\n    return nn.Identity()\n")
    assert isinstance(build(f"{module}:tiny", (4,), 3), nn.Identity)


@pytest.mark.parametrize(
    ("text", "function", "reason"),
    [
        ("x = 1\n", "net", "cannot be imported: AttributeError: module 'own_networks' has no attribute 'net'. It must"),
        ("import not_there_at_all\n", "net", "cannot be imported: ModuleNotFoundError: No module named 'not_there"),
        ("def net(:\n", "net", "cannot be imported: SyntaxError"),
        ("raise RuntimeError('two\\nlines')\n", "net", "cannot be imported: RuntimeError: two lines. It must"),
        ("net = 3\n", "net", "failed: TypeError: 'int' object is not callable. It is called as net((4,), 3)"),
        ("def net():\n    pass\n", "net", "failed: TypeError: net() takes 0 positional arguments but 2 were given"),
        ("def net(shape, classes):\n    return [1]\n", "net", "returned list: net(shape, classes) must return"),
    ],
)
def test_a_network_of_ones_own_with_something_wrong(own, text, function, reason):
    path = list(sys.path)
    assert reason in refused(f"{own(text)}:{function}", (4,), 3)
    assert sys.path == path


@pytest.mark.parametrize("name", ["resnet", "", ":", "module:", ":function"])
def test_an_unknown_name_is_told_what_is_allowed(name):
    said = refused(name, (1, 28, 28), 10)
    assert f"is not known: allowed are {', '.join(NAMES)}" in said
    assert " or package.module:function" in said


def test_networks_that_do_not_fit_their_samples_say_so():
    assert "takes images C x H x W" in refused("resnet20", (64,), 10)
    assert "takes images C x H x W" in refused("wrn-16-4", (64,), 10)


def test_a_module_that_is_not_there():
    assert "No module named 'absent_package'" in refused("absent_package.networks:net", (4,), 3)
    assert "cannot be imported" in refused(".relative:net", (4,), 3)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("cnn", (784,), 10), "'cnn' takes images C x H x W, not samples of shape (784,): use linear or mlp"),
        (("cnn", (1, 7, 28), 10), "height = 7 is not allowed"),
        (("cnn", (1, 28, 7), 10), "width = 7 is not allowed"),
        (("mlp", (1, 0, 28), 10), "shape = 0 is not allowed"),
        (("linear", (5,), 1), "classes = 1 is not allowed"),
    ],
)
def test_shapes_that_cannot_be(arguments, reason):
    assert reason in refused(*arguments)
