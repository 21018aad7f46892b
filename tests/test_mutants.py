"""The mutation tool: what it plants, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = b'''"""A docstring with 1 < 2."""
LIMIT = 3


class Box:
    size: int = 4

    def __repr__(self):
        return "x" + str(1)

    def grows(self, a: int, b: int) -> bool:
        """1 + 1."""
        if not a < b:
            raise ValueError(f"{a + 1} is not below {b}", 1 + 2)
        a = max(a, b) * 2
        self.size = a
        return a
'''


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutants_tool", ROOT / "tools" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_operator_is_planted_and_texts_are_left_alone(tool):
    found = {(m.line, m.operator, m.before, m.after) for m in tool.mutants("box.py", SOURCE)}
    assert found == {
        (2, "constant", "3", "4"),
        (6, "constant", "4", "5"),
        (13, "negate condition", "not a < b", "a < b"),
        (13, "comparison", "a < b", "a <= b"),
        (14, "delete statement", "raise ValueError(f'{a + 1} is not below {b}', 1 + 2)", "pass"),
        (15, "delete statement", "a = max(a, b) * 2", "pass"),
        (15, "max/min", "max", "min"),
        (15, "arithmetic", "max(a, b) * 2", "max(a, b) / 2"),
        (15, "constant", "2", "3"),
        (16, "delete statement", "self.size = a", "pass"),
        (17, "return sibling", "return a", "return b"),
    }


def test_a_mutant_changes_one_place_and_is_python(tool):
    for mutant in tool.mutants("box.py", SOURCE):
        mutated = mutant.plant(SOURCE)
        assert mutated != SOURCE
        assert mutated[: mutant.start] == SOURCE[: mutant.start]
        compile(mutated, "box.py", "exec")


def test_bodies_of_functions_can_be_exchanged_and_the_rest_cannot(tool):
    can = {m.line: tool.is_exchangeable(SOURCE, m.plant(SOURCE)) for m in tool.mutants("box.py", SOURCE)}
    assert not can[2]
    assert not can[6]
    assert can[13]
    assert can[15]
    assert not tool.is_exchangeable(SOURCE, SOURCE)


def test_the_map_names_modules_and_tests_that_are_there(tool):
    for file, tests in tool.TESTS.items():
        assert (ROOT / tool.PACKAGE / file).exists(), file
        for test in tests:
            assert (ROOT / test).exists(), test
