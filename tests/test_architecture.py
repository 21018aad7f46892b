"""The rooms of the house: who may import whom, and what a bare import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "modelmix"
HEAVY = ("torch", "matplotlib", "jinja2", "dp_accounting", "typer", "rich")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", sorted((SOURCE / "accounting").glob("*.py")), ids=lambda p: p.stem)
def test_accounting_imports_numbers_only(path):
    allowed = (
        "modelmix.accounting",
        "modelmix.errors",
        "modelmix._checks",
        "modelmix._files",
        "modelmix._format",
        "numpy",
        "scipy",
        "dp_accounting",
        *sys.stdlib_module_names,
    )
    for name in imports(path) - {"__future__"}:
        assert name.startswith(allowed), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "theory").glob("*.py")), ids=lambda p: p.stem)
def test_theory_imports_numbers_and_accounting_only(path):
    allowed = (
        "modelmix.theory",
        "modelmix.accounting",
        "modelmix._checks",
        "modelmix.errors",
        "numpy",
        "scipy",
        *sys.stdlib_module_names,
    )
    for name in imports(path) - {"__future__"}:
        assert name.startswith(allowed), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sorted((SOURCE / "report").glob("*.py")), ids=lambda p: p.stem)
def test_a_report_is_written_without_torch(path):
    assert not any(name.startswith(("torch", "modelmix.training", "modelmix.data")) for name in imports(path))


@pytest.mark.parametrize(
    "room",
    [
        "training",
        "gradients",
        "gradients/kernels",
        "runs",
        "auditing",
        "data",
        "models",
        "theory",
        "config",
        "report",
    ],
)
def test_only_the_command_line_knows_the_command_line(room):
    for path in (SOURCE / room).glob("*.py"):
        assert not any(name.startswith("modelmix.cli") for name in imports(path)), path


def test_an_epsilon_needs_none_of_the_heavy_packages():
    """Also on a machine where torch is not there at all: importing any of these raises."""
    program = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import modelmix as mm
print(round(mm.epsilon(mm.Mechanism(0.335, 0.03, 11.25, 100), 1e-5, steps=3400), 4))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "6.8572"


def test_importing_the_package_is_quick_and_loads_nothing_heavy():
    program = f"""
import sys, time
start = time.perf_counter()
import modelmix
print(time.perf_counter() - start, *(name for name in (*{HEAVY!r}, "numpy", "scipy") if name in sys.modules))
"""
    runs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True) for _ in "123"]
    seconds = [run.stdout.split() for run in runs]
    assert all(len(words) == 1 for words in seconds), seconds
    assert min(float(words[0]) for words in seconds) < 0.3


@pytest.mark.parametrize(
    "arguments",
    [
        ["curve", "--z", "1", "--q", "0.1", "--steps", "5"],
        ["compare", "--map"],
        ["advise", "clip"],
    ],
    ids=lambda words: words[0],
)
def test_a_plot_without_matplotlib_says_what_to_install(arguments, tmp_path):
    program = f"import sys; sys.modules['matplotlib'] = None; from modelmix.cli import main; main({arguments!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("modelmix: error: plots need matplotlib: install it with pip install 'modelmix[report]'.\n")


def test_a_run_without_matplotlib_ends_without_a_page_and_says_so(tmp_path):
    arguments = ["train", "--steps", "1", "--model", "linear", "--batch", "64", "--out", "here"]
    program = f"import sys; sys.modules['matplotlib'] = None; from modelmix.cli import main; main({arguments!r})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no page: it needs matplotlib" in done.stderr
    assert "Report:" not in done.stdout
    assert not (tmp_path / "here" / "report.html").exists()
    assert (tmp_path / "here" / "certificate.json").exists()


def test_training_without_torch_says_what_to_install():
    program = """
import sys
sys.modules["torch"] = None
import modelmix as mm
try:
    mm.Trainer
except mm.ModelMixError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "Trainer needs torch: install it with pip install 'modelmix[train]'."


def test_the_package_runs_as_a_module():
    arguments = ["epsilon", "--z", "-1", "--q", "0.1", "--steps", "5"]
    done = subprocess.run([sys.executable, "-m", "modelmix", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("modelmix: error: z = -1")


WITH_EXAMPLES = sorted(
    path.relative_to(SOURCE.parent).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(name):
    import doctest
    import importlib

    found = doctest.testmod(importlib.import_module(name))
    assert found.attempted
    assert not found.failed


PUBLIC = """
Augment BudgetExceeded Callback Clip Embedding EmbeddingMechanism Gaussian Guarantee Laplace Law Ledger LoopOptions
Mechanism Mixed ModelMixError Performance Plan Rule RunOptions Schedule Trainer UnprovedError __version__ calibrate
clipped_sum compare delta epsilon epsilon_curve equal_variance_gaussian guarantee load_claim make_private max_steps
mixing_width plan rdp
"""


def test_the_front_door_is_what_it_is_by_decision():
    import modelmix as mm

    assert dir(mm) == sorted(mm.__all__) == PUBLIC.split()
    assert all(hasattr(mm, name) for name in PUBLIC.split())


def test_no_two_files_of_tests_share_a_name():
    """pytest imports them by name: the second one is an error of the whole run, and of no run of its folder alone."""
    names = sorted(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert names == sorted(set(names))
