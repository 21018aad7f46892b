"""``modelmix-lab data`` as a person and as a script use it."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
from website import serving

from modelmix.data import fashion, idx, load
from modelmix_lab.datasets import catalogue, checksum
from modelmix_lab.datasets.checksum import File


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A server with a little Fashion-MNIST, which from now on is the published one."""
    source = tmp_path / "source"
    source.mkdir()
    draw = np.random.default_rng(0)
    for key, name in fashion.CANONICAL.items():
        count = 40 if key.endswith("train") else 20
        array = np.arange(count) % 10 if key[0] == "y" else draw.integers(0, 256, (count, 28, 28))
        idx.write(source / f"{name}.gz", array.astype(np.uint8))
    monkeypatch.setattr(fashion, "OFFICIAL", {})
    with serving() as site:
        site.files = {path.name: path.read_bytes() for path in source.iterdir()}
        files = tuple(File(name, f"md5:{checksum.of_bytes(data)}", len(data)) for name, data in site.files.items())
        public = dataclasses.replace(catalogue.CATALOGUE["fashion-mnist"], url=site.url, files=files)
        monkeypatch.setitem(catalogue.CATALOGUE, "fashion-mnist", public)
        yield site


def test_fetch_then_load(run, site, tmp_path):
    folder = tmp_path / "a b"
    code, out, err = run("data", "fetch", "fashion-mnist", "--data-dir", folder)
    assert code == 0
    assert f"fashion-mnist is complete in {folder / 'fashion-mnist'}: downloaded " in out
    assert f"modelmix-lab train --data fashion-mnist --data-dir '{folder}'" in out
    assert err == "Fashion-MNIST: MIT, (c) 2017 Zalando SE\n"  # and no bar, since this is no terminal
    assert len(load("fashion-mnist", data_dir=folder).train) == 40
    asked = len(site.asked)
    code, out, _ = run("data", "fetch", "fashion-mnist", "--data-dir", folder)
    assert (code, len(site.asked)) == (0, asked)
    assert "was there already" in out


def test_fetch_for_a_script(run, site, tmp_path, monkeypatch):
    monkeypatch.setenv("MODELMIX_DATA", str(tmp_path))
    site.files = {f"mirror/{name}": data for name, data in site.files.items()}
    code, out, _ = run("data", "fetch", "fashion-mnist", "--url-base", f"{site.url}/mirror", "--json")
    data = json.loads(out)
    assert code == 0
    assert data["folder"] == str(tmp_path / "fashion-mnist")
    assert len(data["downloaded"]) == 4
    assert (data["licence"], data["use"]) == ("MIT, (c) 2017 Zalando SE", "modelmix-lab train --data fashion-mnist")


def test_a_resumed_download_says_so(run, site, tmp_path):
    name, content = next(iter(site.files.items()))
    (tmp_path / "fashion-mnist").mkdir()
    (tmp_path / "fashion-mnist" / f"{name}.part").write_bytes(content[:20])
    code, _, err = run("data", "fetch", "fashion-mnist", "--data-dir", tmp_path)
    assert code == 0
    assert f"modelmix-lab: continuing {tmp_path / 'fashion-mnist' / name}.part, which holds 20 of" in err


def test_list(run, site, tmp_path):
    code, out, err = run("data", "list", "--data-dir", tmp_path, "--json")
    data = json.loads(out)
    assert (code, err, data["data_dir"]) == (0, "", str(tmp_path))
    assert [(entry["name"], entry["folder"]) for entry in data["sets"]] == [
        ("cifar10", None), ("svhn", None), ("fashion-mnist", None)
    ]  # fmt: skip
    run("data", "fetch", "fashion-mnist", "--data-dir", tmp_path)
    _, out, _ = run("data", "list", "--data-dir", tmp_path, "--json")
    assert json.loads(out)["sets"][2]["folder"] == str(tmp_path / "fashion-mnist")
    code, text, _ = run("data", "list", "--data-dir", tmp_path)
    assert code == 0
    assert "170 MB" in text
    for told in ("no formal licence", "non-commercial", "MIT"):
        assert told in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fetch", "imagenet"], "there is no public data set 'imagenet': allowed are cifar10, svhn, fashion-mnist"),
        (["fetch"], "Missing argument 'NAME'. See modelmix-lab data fetch --help"),
        ([], "Missing command. See modelmix-lab data --help"),
        (["fetch", "svhn", "--url-base", "file:///"], "cannot be fetched: allowed are plain addresses"),
        (["fetch", "svhn", "--fast"], "No such option: --fast"),
        (["remove"], "No such command 'remove'. See modelmix-lab data --help"),
    ],
)
def test_a_mistake_is_one_line(run, tmp_path, monkeypatch, arguments, reason):
    monkeypatch.setenv("MODELMIX_DATA", str(tmp_path))
    code, out, err = run("data", *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("modelmix-lab: error: ")
    assert reason in err.splitlines()[-1]


def test_a_server_error_is_one_line(run, site, tmp_path):
    site.files = {}
    code, _, err = run("data", "fetch", "fashion-mnist", "--data-dir", tmp_path)
    assert code == 2
    assert "cannot be fetched: the server answered 404" in err.splitlines()[-1]


def test_fetching_needs_no_torch():
    program = "import sys; sys.modules['torch'] = None; from modelmix_lab.cli import main; main(['data', 'list'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "cifar10" in done.stdout


def test_on_a_terminal_there_is_a_bar_for_each_file(run, site, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, out, err = run("data", "fetch", "fashion-mnist", "--data-dir", tmp_path)
    assert code == 0
    assert "is complete" in out
    for name in site.files:
        assert name in err


def test_ctrl_c_is_one_line(run, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("modelmix_lab.datasets.fetch"), "fetch", interrupt)
    code, out, err = run("data", "fetch", "fashion-mnist", "--data-dir", tmp_path)
    assert (code, out) == (130, "")
    assert err.splitlines()[1:] == ["modelmix-lab: interrupted."]
