"""What the laboratory adds to the names that recipes know, and that the library alone does not have them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from nested import recipe_of

import modelmix as mm

BASE = {"epsilon": 3.0, "batch": 40.0, "mixing_width": 2.0, "steps": 6, "model": "linear"}

NONSENSE = {
    "unknown features": (
        {"features": "sift"},
        "features.kind = 'sift' is unknown: choose scatter, patches, prior, patches+prior, efficientnet-lite0, "
        "efficientnet-lite1, efficientnet-lite2, several of these networks with + between, a file",
    ),
    "patches beside a network": ({"features": "patches+efficientnet-lite0"}, "is unknown: choose scatter"),
    "weights without a function": (
        {"features": "scatter", "weights": "w.pt"},
        "features.weights is for package.module:function",
    ),
    "a size without a network": ({"features": "scatter", "feature_size": 64}, "features.size is for pretrained"),
    "components of nothing": ({"features": "patches", "components": 5}, "components is for normalise = scenes"),
    "normalised patches": ({"features": "patches", "normalise": "group"}, "normalise = 'group' is for features"),
    "clips of no moments": (
        {"features": "scatter", "mean_clip": 1.0, "square_clip": 1.0},
        'normalise = "private" needs mean_clip and square_clip, and nothing else takes them',
    ),
}


@pytest.mark.parametrize(("changes", "said"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_about_features_is_refused_in_one_line(changes, said):
    with pytest.raises(mm.ModelMixError) as error:
        recipe_of(**BASE, **changes)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_private_moments_have_the_price_of_the_population():
    private = recipe_of(**BASE, normalise="private", features="scatter", mean_clip=1.0, square_clip=1.0, population=400)
    assert private.price(240) == private.price(241)
    assert private.price(240).population == 400


ALONE = """
import json, sys
import modelmix as mm
from modelmix.data import load
from modelmix.config.recipe import Recipe

def said(make):
    try:
        make()
    except mm.ModelMixError as error:
        return str(error)

changes = [{"kind": "scatter"}, {"kind": "prior", "prior": "synthetic"}, {"kind": "x.onnx", "normalise": "private"}]
found = [said(lambda: Recipe.from_mapping({"features": change})) for change in changes]
found.append(said(lambda: load("cifar10")))
print(json.dumps([found, "modelmix_lab" in sys.modules]))
"""


def test_the_library_alone_refuses_them_and_says_where_they_are():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=True)
    found, loaded = json.loads(done.stdout)
    assert not loaded
    assert all("modelmix-lab" in (line or "") for line in found), found
