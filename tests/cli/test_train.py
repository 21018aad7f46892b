"""``modelmix train`` as a person, a script and a terminal meet it."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import modelmix as mm
from modelmix.config.privacy import MECHANISMS
from modelmix.config.recipe import DEFAULT, Recipe
from modelmix.gradients import engine
from modelmix.runs.folder import RunFolder

RECIPE = """
[data]
source = "{folder}/data.npz"
classes = 3

[model]
kind = "linear"

[privacy]
epsilon = 3.0
steps = 6
batch = 40
mixing_width = 2.0

[optimizer]
lr = {{ schedule = "linear", start = 1.0, end = 0.5 }}
ema = 0.9

[run]
name = "tiny"
evaluate_every = 2
"""
FILES = {
    "certificate.json", "checkpoint.npz", "config.json", "diagnostics.json", "events", "ledger.json", "metrics.json",
    "model-ema.pt", "model.pt", "report.html",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recipe(tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = (rng.normal(size=(300, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    np.savez(tmp_path / "data.npz", x_train=x[:240], y_train=y[:240], x_test=x[240:], y_test=y[240:])
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE.format(folder=tmp_path))
    return path


def visible(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def timeless(folder: Path) -> list[dict]:
    rows = json.loads((folder / "metrics.json").read_text())["rows"]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


# To the end.


def test_a_run_for_people(run, recipe, tmp_path):
    folder = tmp_path / "out"
    code, out, err = run("train", recipe, "--out", folder)
    assert code == 0
    assert visible(folder) == FILES
    assert err.count("\n") == 1  # nobody watches: no progress, just the announcement
    for said in ("modelmix on", "linear, 6 steps", "planned epsilon", "omega = 2", f"Run folder: {folder}"):
        assert said in err
    best = json.loads(run("verify", folder, "--json")[1])["epsilon"]
    assert re.search(r"^epsilon +(\d+\.\d{4})", out, re.MULTILINE)
    shown = float(re.search(r"^epsilon +(\d+\.\d{4})", out, re.MULTILINE)[1])
    assert best <= shown <= best + 1e-4
    for said in ("tiny, delta = 1e-05", "test accuracy", "of the averaged model", "same noise, no mixing"):
        assert said in out
    assert f"modelmix verify {folder} --delta 1e-05" in out
    assert "eeded" not in out


def test_the_ledger_of_a_run_can_be_verified_and_its_page_published(run, recipe, tmp_path):
    folder = tmp_path / "out"
    run("train", recipe, "--out", folder, "--set", "run.seed=271828")
    ledger = mm.Ledger.load(folder / "ledger.json")
    assert ledger == replace(Recipe.load(recipe).plan(240).ledger, seeded=True)
    code, out, _ = run("verify", folder, "--claim", 3)
    assert code == 0
    assert "The claim of 3.0 holds" in out
    assert run("verify", folder, "--claim", 1)[0] == 1
    assert json.loads(run("verify", folder, "--json")[1])["epsilon"] == mm.epsilon(ledger, 1e-5)
    code, out, _ = run("report", folder, "--public")
    assert code == 0
    page = (folder / "report-public.html").read_text()
    assert "271828" not in page
    assert "Diagnostics" not in page
    assert "271828" in (folder / "report.html").read_text()


def test_a_run_for_scripts(run, recipe, tmp_path):
    folder = tmp_path / "out"
    code, out, err = run("train", recipe, "--out", folder, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    last = timeless(folder)[-1]
    assert found["epsilon"] == mm.epsilon(mm.Ledger.load(folder / "ledger.json"), 1e-5) <= 3
    assert found["epsilon"] == last["epsilon_if_stopping_was_fixed_beforehand"]
    assert (found["test_accuracy"], found["ema_accuracy"]) == (last["test_accuracy"], last["ema_accuracy"])
    assert (found["steps"], found["delta"], found["proved"], found["seeded"]) == (6, 1e-5, True, False)
    assert Path(found["report"]).exists()
    assert found["run"] == str(folder)
    assert [row["step"] for row in timeless(folder)] == [2, 4, 6]


def test_a_population_is_public_and_the_number_of_samples_is_told_nowhere(run, recipe, tmp_path):
    """240 samples, planned for a population of 400: no file that may be shared and no line says 240."""
    folder = tmp_path / "out"
    code, out, err = run(
        "train", recipe, "--out", folder, "--set", "privacy.population=400", "--set", "data.test_public=true"
    )
    assert code == 0
    run("report", folder, "--public")
    ledger = mm.Ledger.load(folder / "ledger.json")
    assert (ledger.adjacency, ledger.population) == ("add-or-remove", 400)
    assert ledger.phases[0].mechanism.sample_rate == 0.1
    assert "every scale comes from the public constant 400" in err
    shared = ("config.json", "ledger.json", "metrics.json", "certificate.json", "report-public.html")
    texts = [out, err, *((folder / name).read_text() for name in shared)]
    for text in texts:
        assert not re.search(r"(?<![\d.])240(?![\d.])", re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL))
    assert "add-or-remove" in json.loads((folder / "certificate.json").read_text())["guarantee"]["adjacency"]


def test_classes_are_declared_and_not_counted(run, recipe, tmp_path):
    text = recipe.read_text().replace("classes = 3\n", "")
    recipe.write_text(text)
    code, _, err = run("train", recipe, "--out", tmp_path / "out")
    assert (code, err.count("\n")) == (2, 1)
    assert "--set data.classes=N" in err
    code, _, err = run("train", recipe, "--out", tmp_path / "out", "--set", "data.classes=2")
    assert code == 2
    assert "holds label 2" in err
    assert "(for the data holder's eyes)" in err
    assert not (tmp_path / "out").exists()
    assert run("train", recipe, "--out", tmp_path / "out", "--set", "data.test_public=true", "--json")[0] == 0


def test_two_unseeded_runs_differ_and_two_seeded_ones_do_not(run, recipe, tmp_path):
    states = []
    for i, options in enumerate([[], [], ["--set", "run.seed=4"], ["--set", "run.seed=4"]]):
        run("train", recipe, "--out", tmp_path / f"{i}", "--json", *options)
        states.append((tmp_path / f"{i}" / "model.pt").read_bytes())
    assert states[0] != states[1]
    assert states[2] == states[3]


def test_a_seed_is_for_tests_only_and_every_page_says_so(run, recipe, tmp_path):
    code, out, _ = run("train", recipe, "--out", tmp_path / "out", "--set", "run.seed=4")
    assert code == 0
    assert "Seeded: for tests only; it holds only against those who neither know the seed" in out
    assert not (tmp_path / "out" / "certificate.json").exists()
    assert "Seeded: for tests only" in run("verify", tmp_path / "out")[1]
    assert "for tests only" in (tmp_path / "out" / "report.html").read_text()
    assert (
        json.loads(run("train", recipe, "--out", tmp_path / "two", "--set", "run.seed=4", "--json")[1])["seeded"]
        is True
    )


@pytest.mark.parametrize("mechanism", list(MECHANISMS))
def test_every_mechanism(run, recipe, tmp_path, mechanism):
    law, rule, mixes = MECHANISMS[mechanism]
    folder = tmp_path / "out"
    code, out, err = run("train", recipe, "--out", folder, "--mechanism", mechanism, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    config, ledger = json.loads((folder / "config.json").read_text()), mm.Ledger.load(folder / "ledger.json")
    assert config["settings"]["rule"] == rule
    assert {(p.mechanism.law, p.mechanism.mixed) for p in ledger.phases} == {(law, mixes)}
    assert ledger.steps == 6
    assert found["proved"] == (mechanism != "released")
    if found["proved"]:
        assert 2.997 <= found["epsilon"] <= 3
        assert run("verify", folder, "--claim", 3)[0] == 0


def test_the_released_configuration_never_shows_a_proved_epsilon(run, recipe, tmp_path):
    """Not on the screen, not in a file, not by verify. Its claim is kept under that name, and marked on the page."""
    folder = tmp_path / "out"
    code, out, err = run("train", recipe, "--out", folder, "--mechanism", "released")
    assert code == 0
    assert re.search(r"^epsilon +not proved", out, re.MULTILINE)
    assert "epsilon: not proved" in err
    code, again, _ = run("train", "--out", folder, "--resume", "--json")
    found = json.loads(again)
    assert (code, found["proved"], found["epsilon"], found["accountant"]) == (0, False, None, None)
    assert len(found["unproved"]) == 4
    assert {row["epsilon_if_stopping_was_fixed_beforehand"] for row in timeless(folder)} == {None}
    config = json.loads((folder / "config.json").read_text())
    claim = config.pop("claimed_epsilon")
    assert 2.9 < claim <= 3
    assert config["recipe"]["privacy"].pop("epsilon") == 3.0  # what was asked for
    assert "epsilon" not in json.dumps(config)
    run("report", folder, "--public")
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".json", ".html")}
    texts |= {"stdout": out, "stderr": err, "json": again}
    number = re.compile(r"epsilon\W{0,12}(?:=|:|is)\W{0,6}\d")
    for name, text in texts.items():
        plain = re.sub(r"<[^>]*>", " ", text)
        if name == "config.json":
            continue  # read above
        assert not number.search(plain), name
        for match in re.finditer(rf"{claim:.3f}", plain):
            assert "claimed, not proved" in plain[max(0, match.start() - 40) : match.start()], name
    for page in ("report.html", "report-public.html"):
        assert "epsilon: not proved" in texts[page]
    (events,) = (folder / "events").iterdir()
    assert b"test_accuracy" in events.read_bytes()
    assert b"epsilon" not in events.read_bytes()
    code, out, err = run("verify", folder)
    assert (code, out) == (2, "")
    assert err.startswith("modelmix: error: not proved: ")
    code, out, _ = run("verify", folder, "--json", "--claim", 1000)
    assert (code, json.loads(out)["proved"], json.loads(out)["epsilon"]) == (1, False, None)


# Stopped and resumed.


def test_ctrl_c_says_how_to_go_on(run, recipe, tmp_path, monkeypatch):
    """The recipe need not be named again: the folder knows it, with what was changed on the command line."""
    whole, cut = tmp_path / "whole", tmp_path / "cut run"
    options = [recipe, "--set", "run.seed=4", "--lr", 0.25, "--set", "run.chunk=8"]
    run("train", *options, "--out", whole)
    genuine, calls = engine.Engine.__call__, [0]

    def clipped_sum(*arguments: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == 20:
            raise KeyboardInterrupt
        return genuine(*arguments, **options)

    monkeypatch.setattr(engine.Engine, "__call__", clipped_sum)
    code, out, err = run("train", *options, "--out", cut)
    step = RunFolder(cut).load_checkpoint()[1]["step"]
    assert (code, out) == (130, "")
    assert 0 < step < 6
    assert err.splitlines()[1:] == [f"stopped at step {step}; go on with: modelmix train --out '{cut}' --resume"]
    code, _, err = run("train", "--out", cut, "--resume", "--set", "run.chunk=8")
    assert code == 0
    assert f"(resumed at step {step})" in err
    assert timeless(cut) == timeless(whole)
    assert visible(cut) == FILES - {"certificate.json"}
    for name in ("model.pt", "model-ema.pt", "ledger.json", "diagnostics.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_ctrl_c_before_the_first_step_is_one_line(run, recipe, tmp_path, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Recipe, "trainer", interrupt)
    assert run("train", recipe, "--out", tmp_path / "out") == (130, "", "modelmix: interrupted.\n")


def test_sigterm_keeps_the_last_state(run, recipe, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    options = [recipe, "--set", "run.seed=4", "--set", "run.chunk=8"]
    run("train", *options, "--out", whole)
    genuine, calls = engine.Engine.__call__, [0]

    def clipped_sum(*arguments: object, **options: object) -> object:
        calls[0] += 1
        if calls[0] == 20:
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # else the tests themselves end here
            os.kill(os.getpid(), signal.SIGTERM)
        return genuine(*arguments, **options)

    monkeypatch.setattr(engine.Engine, "__call__", clipped_sum)
    code, out, _ = run("train", *options, "--out", cut)
    assert (code, out) == (143, "")
    assert 0 < RunFolder(cut).load_checkpoint()[1]["step"] < 6
    assert run("train", "--out", cut, "--resume", "--set", "run.chunk=8")[0] == 0
    assert visible(cut) == FILES - {"certificate.json"}
    for name in ("model.pt", "ledger.json"):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_resuming_what_is_done_mends_its_files(run, recipe, tmp_path):
    folder = tmp_path / "out"
    run("train", recipe, "--out", folder)
    model = (folder / "model.pt").read_bytes()
    for name in ("model.pt", "report.html", "metrics.json"):
        (folder / name).unlink()
    code, out, _ = run("train", "--out", folder, "--resume", "--json")
    assert (code, json.loads(out)["steps"]) == (0, 6)
    assert visible(folder) == FILES
    assert (folder / "model.pt").read_bytes() == model


def test_resume_begins_where_there_is_nothing(run, recipe, tmp_path):
    """So that a script may always say --resume."""
    assert run("train", recipe, "--out", tmp_path / "out", "--resume", "--json")[0] == 0
    assert run("train", recipe, "--out", tmp_path / "out", "--resume", "--json")[0] == 0


# Refusals.

NONSENSE = {
    "two targets": (
        ["{recipe}", "--epsilon", 2, "--set", "privacy.noise_multiplier=1"],
        "[privacy] needs one of epsilon, noise_multiplier for modelmix: it has epsilon and noise_multiplier",
    ),
    "no run to resume": (["--out", "nowhere", "--resume"], "holds no run: check the folder"),
    "mirror of pixels": (
        ["{recipe}", "--set", "features.mirror=true"],
        "object missing required field `kind`",
    ),
    "no such folder": (["--data", "nowhere", "--set", "data.image_size=32"], "is not there: allowed are"),
    "nothing to resume": (["{recipe}", "--resume"], "--resume needs --out"),
    "no such recipe": (["nowhere.toml"], "cannot read nowhere.toml"),
    "no recipe": (["{data}"], "cannot be read as TOML"),
    "unknown mechanism": (["{recipe}", "--mechanism", "mix"], "choose one of modelmix"),
    "plain with a width": (
        ["{recipe}", "--mechanism", "plain", "--set", "privacy.mixing_width=1"],
        "plain does not mix",
    ),
    "no steps": (["{recipe}", "--steps", 0], "privacy.steps = 0 is not allowed: expected `int` >= 1"),
    "half a step": (["{recipe}", "--steps", 1.5], "--steps"),
    "negative epsilon": (["{recipe}", "--epsilon", -1], "> 0"),
    "delta one": (["{recipe}", "--delta", 1], "< 1"),
    "large batch": (["{recipe}", "--batch", 999], "at most 1"),
    "no clip": (["{recipe}", "--clip", 0], "> 0"),
    "momentum one": (["{recipe}", "--set", "optimizer.momentum=1"], "< 1"),
    "unknown model": (["{recipe}", "--model", "resnet"], "cnn, linear, mlp"),
    "features for a cnn": (["{recipe}", "--model", "cnn"], "use linear or mlp"),
    "no such data": (["{recipe}", "--data", "nowhere.npz"], "nowhere.npz"),
    "no such device": (["{recipe}", "--device", "abacus"], "this machine has cpu"),
    "unknown engine": (["{recipe}", "--set", "run.engine=steam"], "choose one of auto, hooks"),
    "no chunk": (["{recipe}", "--set", "run.chunk=0"], ">= 1"),
    "into a file": (["{recipe}", "--out", "{data}"], "is a file"),
    "into a full folder": (["{recipe}", "--out", "{home}"], "not empty"),
    "unknown option": (["{recipe}", "--wombat", 1], "No such option: --wombat"),
    "an option of before": (
        ["{recipe}", "--omega", 1],
        "give --set privacy.mixing_width=VALUE",
    ),
    "a switch of before": (["{recipe}", "--no-mirror"], "give --set features.mirror=VALUE"),
    "a prior of before": (["{recipe}", "--prior", "x"], "give --set model.prior=VALUE or --set features.prior=VALUE"),
    "set without a value": (["{recipe}", "--set", "privacy.delta"], "write --set TABLE.KEY=VALUE"),
    "set without a table": (
        ["{recipe}", "--set", "delta=1e-6"],
        "did you mean privacy.delta?",
    ),
    "set twice": (["{recipe}", "--set", "run.seed=1", "--set", "run.seed=2"], "run.seed was given 2 times"),
    "set beside its option": (["{recipe}", "--delta", 1e-6, "--set", "privacy.delta=1e-5"], "was given 2 times"),
    "set to nothing": (["{recipe}", "--set", "privacy.steps="], "privacy.steps = '' is not allowed"),
}


@pytest.mark.parametrize(("arguments", "said"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_in_one_line(run, recipe, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    names = {"recipe": recipe, "data": tmp_path / "data.npz", "home": tmp_path}
    code, out, err = run("train", *(str(argument).format(**names) for argument in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("modelmix: error: ")
    assert said in err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_run_is_not_resumed_as_another(run, recipe, tmp_path):
    folder = tmp_path / "out"
    run("train", recipe, "--out", folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    data = tmp_path / "data.npz"
    cases = {
        "holds a run already": [recipe],
        "another plan": ["--resume", "--delta", 1e-6],
        "(lr)": [recipe, "--resume", "--lr", 0.1],
        "(seed)": ["--resume", "--set", "run.seed=1"],
        "other settings (ema, lr": [
            DEFAULT,
            "--resume",
            "--model",
            "linear",
            "--data",
            data,
            "--batch",
            40,
            "--set",
            "data.classes=3",
        ],
    }
    for said, arguments in cases.items():
        code, out, err = run("train", *arguments, "--out", folder)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert said in err
    np.savez(data, **{**np.load(data), "y_train": (np.arange(240) + 1) % 3})
    code, _, err = run("train", "--out", folder, "--resume")
    assert (code, err.count("\n")) == (2, 1)
    assert "a ledger is about one data set" in err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_of_an_older_program_can_be_read_and_not_resumed(run, recipe, tmp_path):
    """Version 2 of config.json had recipes without tables."""
    folder = tmp_path / "out"
    run("train", recipe, "--out", folder)
    epsilon = json.loads(run("verify", folder, "--json")[1])["epsilon"]
    config = json.loads((folder / "config.json").read_text())
    older = {**config, "version": 2, "recipe": {"name": "tiny", "features": "net.onnx", "epsilon": 3.0, "steps": 6}}
    (folder / "config.json").write_text(json.dumps(older))
    assert json.loads(run("verify", folder, "--json")[1])["epsilon"] == epsilon
    assert run("report", folder)[0] == 0
    assert "no private sample taught the network of the features, net.onnx" in (folder / "report.html").read_text()
    for arguments in ([], [recipe]):
        code, out, err = run("train", *arguments, "--out", folder, "--resume")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "was begun by an older program (version 2 of config.json, this one writes 3)" in err


def test_a_warning_is_one_line_too(run, recipe, tmp_path):
    code, _, err = run("train", recipe, "--out", tmp_path / "out", "--batch", 0.5)
    assert code == 0
    warning, announcement = err.splitlines()
    assert warning.startswith("modelmix: warning: the expected batch q*n = 0.5 is below 1: ")
    assert announcement.startswith("modelmix on ")


# The recipe and the help.


def test_the_shown_recipe_can_be_fed_back(run, recipe, tmp_path):
    code, text, err = run("train", "--show-recipe")
    assert (code, err) == (0, "")
    assert text == DEFAULT.read_text()
    (tmp_path / "own.toml").write_text(text)
    assert Recipe.load(tmp_path / "own.toml") == Recipe.load(DEFAULT)
    _, text, _ = run("train", recipe, "--show-recipe", "--epsilon", 2, "--mechanism", "plain", "--set", "run.seed=1")
    (tmp_path / "own.toml").write_text(text)
    wanted = Recipe.load(recipe).changed({"privacy.epsilon": 2.0, "privacy.kind": "plain", "run.seed": 1})
    assert Recipe.load(tmp_path / "own.toml") == wanted
    assert run("train", tmp_path / "own.toml", "--out", tmp_path / "out", "--json")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["recipe"] == wanted.as_dict()
    _, again, _ = run("train", "--out", tmp_path / "out", "--resume", "--show-recipe")
    assert again == text
    code, out, err = run("train", tmp_path / "data.npz", "--show-recipe")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_the_folder_gets_a_name_of_its_own(run, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe.write_text(recipe.read_text().replace('"tiny"', '"../odd [bold]name/"'))
    code, out, _ = run("train", recipe)
    assert code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\.\.-odd-bold-name--\d{8}-\d{6}", folder.name)
    assert "../odd [bold]name/, delta" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npz", "runs", "tiny.toml"]


def test_help_reads_well_at_eighty_columns(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("train", "--help")
    assert code == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    flat = " ".join(out.split())
    for option in ("--mechanism", "--epsilon", "--resume", "--set", "--show-recipe", "--json", "--data", "--spent"):
        assert option in flat
    assert [flat.index(f" {panel} ") for panel in ("basic", "privacy", "advanced")] == sorted(
        flat.index(f" {panel} ") for panel in ("basic", "privacy", "advanced")
    )
    assert "modelmix train --out runs/mine --resume" in flat


# On a terminal.


def _on_a_terminal(arguments: list[object], interrupt_at: bytes | None = None) -> tuple[int, str]:
    """Exit code and what stderr, a terminal of 80 columns, was shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-m", "modelmix", "train", *map(str, arguments)]

    def hears_ctrl_c() -> None:  # where the tests run in the background it is ignored, and that is inherited
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, env=environment,
        preexec_fn=hears_ctrl_c,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        shown += piece
        if not piece:
            break
        if interrupt_at is not None and interrupt_at in shown:
            process.send_signal(signal.SIGINT)
            interrupt_at = None
    process.communicate(timeout=60)
    os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return process.returncode, text


def test_a_terminal_sees_steps_speed_and_epsilon(recipe, tmp_path):
    code, shown = _on_a_terminal([recipe, "--out", tmp_path / "out", "--set", "run.seed=1"])
    assert code == 0
    last = [line for line in re.split(r"[\r\n]+", shown) if "training" in line][-1]
    assert len(last) <= 80
    found = re.search(r"6/6 (\d+\.\d) steps/s 0:00:00 epsilon (\d\.\d{3}) planned at delta 1e-05, seeded", last)
    assert found
    assert 0 <= float(found[2]) - mm.epsilon(mm.Ledger.load(tmp_path / "out" / "ledger.json"), 1e-5) <= 1e-3  # up


def test_ctrl_c_on_a_terminal(recipe, tmp_path):
    folder = tmp_path / "out"
    noise = ("--set", "privacy.noise_multiplier=300", "--set", "run.evaluate_every=100000")
    arguments = [recipe, "--out", folder, *noise, "--steps", 100000, "--mechanism", "plain"]
    code, shown = _on_a_terminal(arguments, interrupt_at=b"steps/s")
    assert code == 130
    assert "Traceback" not in shown
    step = int(re.search(r"stopped at step (\d+); go on with", shown)[1])
    assert RunFolder(folder).load_checkpoint()[1]["step"] == step > 0
    # A line is written before the state it accounts for: an interrupt between the two leaves it one ahead.
    assert step <= RunFolder(folder).load_ledger().steps <= step + 1
