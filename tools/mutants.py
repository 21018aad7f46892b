"""Plants one bug at a time in a copy of the source tree and runs the tests that go with the module.

    python tools/mutants.py --files 'accounting/*.py' --jobs 2 --out build/mutants.jsonl

A mutant that no test kills shows a line whose meaning no test holds. One JSON line is written for every mutant: file,
line, operator, before, after, verdict (killed, survived or timeout), seconds, and by which test it was killed. The
working tree is never modified, and the same arguments always plant the same mutants.

How it is fast: the tests of a module are collected once, and every mutant runs in a forked child in which the code of
the mutated function is exchanged; a mutant outside functions, or any with ``--fresh``, is imported anew. Tests that
killed a neighbour run first, then quick ones, and slow ones (``--slow``) are left out.
Docstrings, annotations, decorators, error texts and representations are not mutated.
"""

from __future__ import annotations

import argparse
import ast
import copy
import functools
import importlib
import inspect
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/modelmix")

_A, _T, _X = "tests/accounting/", "tests/training/", "tests/attacks/"
_G = "tests/gradients/"
_CORE = [_A + "test_properties.py", _A + "test_mechanism.py"]
_MEETING = [_X + "test_samples_meet.py", _X + "test_random_programs.py", _G + "test_engine.py", _G + "test_engines.py"]
_LOOPS = [
    _T + "test_private.py",
    *(_X + f"test_{n}.py" for n in ("losses_that_mix", "noise_used_twice", "ledgers_of_loops", "choices_by_the_batch")),
]
TESTS: dict[str, list[str]] = {
    "accounting/adjacency.py": [_A + "test_adjacency.py"],
    "accounting/plan.py": [_A + "test_plan.py"],
    "accounting/runs.py": [_A + "test_runs.py"],
    "accounting/guarantee.py": [_A + "test_guarantee.py", _A + "test_adjacency.py"],
    "accounting/renyi.py": [*_CORE, _A + "test_renyi.py", _A + "test_reference.py"],
    "accounting/accountant.py": [*_CORE, _A + "test_renyi.py", _A + "test_reference.py"],
    "accounting/mechanism.py": [*_CORE, _A + "test_ledger.py"],
    "accounting/ledger.py": [_A + f"test_{n}.py" for n in ("ledger", "plan", "runs")],
    "accounting/embedding.py": [*_CORE, _A + "test_ledger.py", _A + "test_embedded_mechanism.py"],
    "accounting/pld.py": [_A + "test_pld.py"],
    **{
        f"accounting/{name}.py": [_A + "test_losses_mutants.py", _A + "test_losses.py", _A + "test_losses_attacked.py"]
        for name in ("loss_distribution", "coordinate_losses", "cone", "composition")
    },
    "accounting/comparison.py": [_A + "test_comparison.py"],
    "accounting/calibration.py": [_A + "test_calibration.py"],
    "_checks.py": ["tests/test_checks.py"],
    "accounting/functions.py": [_A + "test_functions.py", _A + "test_quadrature.py"],
    "accounting/laws.py": [_A + "test_laws.py", _A + "test_quadrature.py", *_CORE],
    "accounting/moments.py": [_A + "test_quadrature.py", _A + "test_moments.py"],
    "accounting/quadrature.py": [_A + "test_quadrature.py", _A + "test_moments.py"],
    "accounting/facts.py": [_A + "test_facts.py", _A + "test_laws.py"],
    "auditing/bounds.py": ["tests/auditing/test_bounds.py"],
    "auditing/mechanism.py": ["tests/auditing/test_mechanism_audit.py", "tests/auditing/test_embedding_sensitivity.py"],
    "training/step.py": [_T + "test_rules.py", _T + "test_one_step.py", _T + "test_phases.py"],
    "training/rules.py": [_T + "test_rules.py"],
    "training/schedules.py": [_T + "test_rules.py"],
    "training/randomness.py": [_T + "test_randomness.py", _T + "test_keystream.py"],
    "training/sampling.py": [_T + "test_sampling.py"],
    "gradients/clip.py": [_G + "test_clip.py", _G + "test_forms.py"],
    "training/norms.py": ["tests/theory/test_clip_theory.py"],
    "gradients/forms.py": [_G + "test_forms.py", _G + "test_clip.py"],
    "training/embedding/public.py": [_T + "test_embedding.py"],
    "training/embedding/basis.py": [_T + "test_embedding.py"],
    "training/embedding/clip.py": [_T + "test_embedding.py"],
    "training/augment.py": [_T + "test_augment.py"],
    "training/digests.py": [_T + "test_augment.py"],
    "training/guard.py": [_G + "test_memory.py"],
    "gradients/memory.py": [
        _G + "test_memory.py",
        *(_X + f"test_{name}.py" for name in ("choices_by_the_batch", "ledgers_of_loops")),
    ],
    "runs/record.py": [_T + "test_resume.py", _T + "test_failures.py", _LOOPS[2]],
    "training/trainer.py": [
        _T + "test_one_step.py",
        *(_T + f"test_{name}.py" for name in ("phases", "account", "spent")),
        *(_X + f"test_{name}.py" for name in ("noise_used_twice", "number_of_samples")),
    ],
    "training/private.py": [_T + "test_one_step.py", *_LOOPS],
    "gradients/dataflow.py": [_X + "test_single_operations.py"],
    "gradients/aten_rules.py": [_X + "test_single_operations.py"],
    "gradients/aten_view_rules.py": [_X + "test_single_operations.py"],
    "gradients/aten_layer_rules.py": [*_MEETING, _X + "test_architectures.py"],
    "gradients/trace.py": _MEETING,
    "gradients/proved_pass.py": _MEETING,
    "gradients/selection.py": _MEETING,
    "gradients/engine.py": _MEETING,
    "gradients/hooks.py": _MEETING,
    "gradients/vmap.py": _MEETING,
}  # fmt: skip
"""Which tests hold the meaning of a module. A module that is not named here is not mutated."""

PRELOADED = (
    *("numpy", "scipy.stats", "scipy.optimize", "mpmath", "hypothesis", "pytest", "_pytest.assertion.rewrite"),
    *("torch", "torch.func", "dp_accounting", "dp_accounting.rdp", "dp_accounting.pld.privacy_loss_distribution"),
)
_MEMORY = 6 * 2**30  # bytes of address space for a mutant that asks for too much
_LEAST_LIMIT = 30.0  # seconds
_BASELINE_LIMIT = 900.0

# What is planted.

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
_TWINS = {
    "max": "min", "maximum": "minimum", "argmax": "argmin", "amax": "amin", "floor": "ceil", "any": "all",
    "clamp_min": "clamp_max",
}  # fmt: skip
_NAMES = {**_TWINS, **{twin: name for name, twin in _TWINS.items()}}
_SYMMETRIC = {"max", "min", "maximum", "minimum", "logaddexp", "hypot", "isinstance", "zip", "print", "range"}
_TEXT_CALLS = {"warn", "info", "debug", "warning", "print", "TypeVar", "cast", "field"}
_TEXT_FUNCTIONS = {"__repr__", "__str__", "_describe"}


@dataclass(frozen=True)
class Mutant:
    """One planted bug: the source between two byte positions of a file is replaced."""

    file: str
    line: int
    column: int
    operator: str
    before: str
    after: str
    start: int
    end: int
    text: str

    def plant(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        """What names a mutant in a result file."""
        return self.file, self.line, self.column, self.before, self.after


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file, in the order of the source."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.found = file, list[Mutant]()
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._locals: list[list[str]] = []

    def _add(self, operator: str, node: ast.AST, after: ast.AST | str) -> None:
        where: Any = node
        start = self._starts[where.lineno - 1] + where.col_offset
        end = self._starts[where.end_lineno - 1] + where.end_col_offset
        before, new = ast.unparse(node), after if isinstance(after, str) else ast.unparse(after)
        if before == new or (isinstance(node, ast.Constant) and before == f"({new})"):
            return
        text = new if isinstance(node, ast.stmt) or isinstance(after, str) else f"({new})"
        self.found.append(Mutant(self.file, where.lineno, where.col_offset, operator, before, new, start, end, text))

    def _changed(self, operator: str, node: ast.AST, **fields: object) -> None:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        self._add(operator, node, new)

    # What is left alone.

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._body(node.body)

    # Statements.

    def _body(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def visit_Module(self, node: ast.Module) -> None:
        self._body(node.body)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._locals.append([])
        self._body(node.body)
        self._locals.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _TEXT_FUNCTIONS:
            return
        arguments = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default is not None:
                self.visit(default)
        self._locals.append([name for name in arguments if name not in ("self", "cls")])
        self._body(node.body)
        self._locals.pop()

    def _defines(self, target: ast.expr) -> None:
        known = self._locals[-1] if self._locals else []
        for name in ast.walk(target):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store) and name.id not in known:
                known.append(name.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        known = self._locals[-1] if self._locals else []
        target = node.targets[0]
        again = isinstance(target, ast.Name) and target.id in known
        if again or isinstance(target, ast.Subscript | ast.Attribute):
            self._add("delete statement", node, "pass")
        self.visit(node.value)
        self._defines(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        self._defines(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add("delete statement", node, "pass")
        if type(node.op) in _ARITHMETIC:
            self._changed("arithmetic", node, op=_ARITHMETIC[type(node.op)]())
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _called(node.value) in _TEXT_CALLS:
            return
        if not isinstance(node.value, ast.Yield | ast.YieldFrom):
            self._add("delete statement", node, "pass")
        self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add("delete statement", node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        if isinstance(node.value, ast.Name) and self._locals:
            others = [name for name in self._locals[-1] if name != node.value.id]
            if others:
                self._changed("return sibling", node, value=ast.Name(others[-1]))
        if isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            self._changed("return swapped", node, value=ast.Tuple(node.value.elts[::-1], ast.Load()))
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._defines(node.target)
        self.visit(node.iter)
        self._body(node.body)
        self._body(node.orelse)

    def _conditional(self, node: ast.If | ast.IfExp | ast.While) -> None:
        negated = node.test.operand if isinstance(node.test, ast.UnaryOp) else ast.UnaryOp(ast.Not(), node.test)
        self._add("negate condition", node.test, negated)
        if isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not):
            self.visit(node.test.operand)  # dropping its ``not`` is the negation
        else:
            self.visit(node.test)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test).endswith("TYPE_CHECKING"):
            return
        self._conditional(node)
        self._body(node.body)
        self._body(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._conditional(node)
        self._body(node.body)
        self._body(node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._conditional(node)
        self.visit(node.body)
        self.visit(node.orelse)

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            self._changed("comparison", node, ops=[*node.ops[:i], _COMPARISONS[type(op)](), *node.ops[i + 1 :]])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC and not _is_type(node):
            self._changed("arithmetic", node, op=_ARITHMETIC[type(node.op)]())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self._changed("and/or", node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        name = {ast.Not: "drop not", ast.USub: "drop minus", ast.Invert: "drop not"}.get(type(node.op))
        if name:
            self._add(name, node, node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._changed("constant", node, value=not value)
        elif isinstance(value, int | float) and value + 1 != value:
            self._changed("constant", node, value=value + 1)
        elif isinstance(value, float):
            self._changed("constant", node, value=value / 2)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _NAMES:
            self._changed("max/min", node, id=_NAMES[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _NAMES:
            self._changed("max/min", node, attr=_NAMES[node.attr])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if _called(node) in _TEXT_CALLS:
            return
        if _called(node) not in _SYMMETRIC:
            for i in range(min(2, len(node.args) - 1)):
                pair = node.args[i : i + 2]
                if not any(isinstance(a, ast.Starred) or _is_text(a) for a in pair):
                    self._changed("swap arguments", node, args=[*node.args[:i], *pair[::-1], *node.args[i + 2 :]])
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not _is_type(node):
            self.generic_visit(node)


def _called(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else None
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_type(node: ast.expr) -> bool:
    """An alias of types: ``tuple[...]``, ``A | B``."""
    head: ast.expr = node
    while isinstance(head, ast.Subscript | ast.BinOp):
        head = head.value if isinstance(head, ast.Subscript) else head.left
    name = head.id if isinstance(head, ast.Name) else getattr(head, "attr", "")
    return name in ("tuple", "list", "dict", "Literal", "Callable", "NDArray", "Mapping", "deque") or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and name[:1].isupper()
    )


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file that is still Python, in the order of the source and each once."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    unique = {(m.start, m.end, m.text): m for m in reversed(finder.found)}
    found = []
    for mutant in sorted(unique.values(), key=lambda m: (m.start, m.end, m.operator, m.text)):
        try:
            compile(mutant.plant(source), file, "exec")
        except SyntaxError:
            continue
        found.append(mutant)
    return found


# Running.


def _functions(code: CodeType, path: tuple[str, ...] = ()) -> tuple[dict[tuple[str, ...], CodeType], list[Any]]:
    """The functions of a module and of its classes, and all the rest of its code."""
    rest: list[Any] = [code.co_code, code.co_names]
    found: dict[tuple[str, ...], CodeType] = {}
    for constant in code.co_consts:
        if not isinstance(constant, CodeType):
            rest.append(repr(constant))
        elif constant.co_flags & inspect.CO_NEWLOCALS and constant.co_flags & inspect.CO_OPTIMIZED:
            key = (*path, constant.co_name)
            if key in found:
                rest.append(constant)  # two of one name: not to be told apart
            found[key] = constant
        else:
            more, inside = _functions(constant, (*path, constant.co_name))
            found |= more
            rest += inside
    return found, rest


def is_exchangeable(source: bytes, mutated: bytes) -> bool:
    """Whether a mutant changes bodies of functions alone: these can be exchanged in a package that is loaded."""
    (old, rest), (new, rest_new) = (_functions(compile(text, "", "exec", optimize=0)) for text in (source, mutated))
    changed = [path for path in new if path in old and old[path] != new[path]]
    return (
        rest == rest_new and old.keys() == new.keys() and bool(changed) and all("<" not in p[-1] for p in changed)
        and all(old[path].co_freevars == new[path].co_freevars for path in changed)
    )  # fmt: skip


def exchange(file: str, source: str) -> None:
    """Gives the functions of a loaded module the code of another source, wherever they were imported to."""
    module = importlib.import_module(".".join(["modelmix", *Path(file).with_suffix("").parts]))
    new, _ = _functions(compile(source, str(module.__file__), "exec", optimize=0))
    for path, code in new.items():
        found: Any = module
        for name in path:
            found = vars(found).get(name) if isinstance(found, type | ModuleType) else None
        if isinstance(found, property):
            found = found.fget
        for inner in ("func", "__func__", "__wrapped__"):
            found = getattr(found, inner, found)
        if isinstance(found, FunctionType):
            found.__code__ = code
    for name, loaded in list(sys.modules.items()):
        if name.startswith("modelmix"):
            for value in list(vars(loaded).values()):
                if type(value) is functools._lru_cache_wrapper:
                    value.cache_clear()  # what was computed before the mutation


class _Plugin:
    """What a child tells of its tests: how long each took and which one failed first."""

    def __init__(self, order: Sequence[str] | None, pipes: tuple[int, int] | None) -> None:
        self.rank = None if order is None else {test: i for i, test in enumerate(order)}
        self.requests: Iterator[str] | None = None if pipes is None else os.fdopen(pipes[0])
        self.replies = -1 if pipes is None else pipes[1]
        self.failed, self.why, self.took = "", "", dict[str, float]()
        self.failures: set[str] = set()

    def pytest_sessionstart(self) -> None:
        from hypothesis import Phase, settings

        # The first counterexample is enough: making it small costs more than finding it.
        settings.register_profile("mutants", settings(), phases=(Phase.explicit, Phase.generate))
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        rank = self.rank
        if rank is not None:
            items[:] = sorted((item for item in items if item.nodeid in rank), key=lambda item: rank[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = f"{report.nodeid} (import)"

    def pytest_runtestloop(self, session: Any) -> bool | None:
        """Where requests come in: collected once, the tests run in a forked child for every mutant."""
        if self.requests is None:
            return None
        os.write(self.replies, b".")
        for line in self.requests:
            request = json.loads(line)
            child = os.fork()
            if not child:
                self._one(session, **request["mutant"])
            if not _wait(child, request["limit"]):
                Path("outcome.json").write_text(json.dumps({"status": "late"}))
            os.write(self.replies, b".")
        return True

    def _one(self, session: Any, file: str, source: str, order: list[str]) -> None:
        from _pytest.main import pytest_runtestloop

        outcome: dict[str, Any] = {"status": "error"}
        try:
            os.setsid()
            exchange(file, source)
            rank = {test: i for i, test in enumerate(order)}
            session.items = sorted((i for i in session.items if i.nodeid in rank), key=lambda i: rank[i.nodeid])
            with suppress(session.Failed, session.Interrupted):
                pytest_runtestloop(session)
            outcome = {"status": 1 if self.failed else 0, "failed": self.failed, "why": self.why}
        except BaseException:
            outcome["failed"] = traceback.format_exc()
        finally:
            Path("outcome.json").write_text(json.dumps(outcome))
            os._exit(0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.took[nodeid] = -time.process_time()  # not the clock's: others may use the machine

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.took[nodeid] += time.process_time()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failures.add(report.nodeid)
        if report.failed and not self.failed:
            self.failed, self.why = report.nodeid, str(report.longrepr)[-600:]


def _fork(
    tree: Path,
    files: Sequence[str],
    order: Sequence[str] | None,
    pipes: tuple[int, int] | None = None,
    stop: bool = True,
) -> int:
    """A child process that runs tests in a copy of the tree and leaves ``outcome.json`` there.

    Args:
        files: with the tests.
        order: the tests of them that are run, the first one first; None runs all.
        pipes: read for requests and write replies to, once the tests are collected; None runs the tests once.
        stop: at the first test that fails.
    """
    (tree / "outcome.json").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        log = os.open(tree / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutant of the same length in the same second is another one
        sys.dont_write_bytecode = True
        sys.path[:] = [str(tree / "src"), *(entry for entry in sys.path if entry not in ("", str(ROOT / "tools")))]
        import pytest

        plugin = _Plugin(order, pipes)
        arguments = [
            *(["-x"] if stop else []),
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            "-W",
            "ignore:Module already imported",
        ]
        status = int(pytest.main([*arguments, *files], plugins=[plugin]))
        loaded = getattr(sys.modules.get("modelmix"), "__file__", None)
        if loaded and not Path(loaded).is_relative_to(tree):
            plugin.failed, status = f"wrong package {loaded}", 70
        outcome = {"status": status, "failed": plugin.failed, "took": plugin.took, "failures": sorted(plugin.failures)}
        (tree / "outcome.json").write_text(json.dumps(outcome))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class _Server:
    """A process with the tests of one module collected, in one copy of the tree."""

    def __init__(self, tree: Path, files: Sequence[str]) -> None:
        inside, self._requests = os.pipe()
        self._replies, outside = os.pipe()
        self.process = _fork(tree, files, None, (inside, outside))
        os.close(inside)
        os.close(outside)
        if not os.read(self._replies, 1):  # all is imported: from now on a mutant may lie in the tree
            raise SystemExit(f"the tests cannot be collected:\n{(tree / 'log.txt').read_text()[-2000:]}")

    def ask(self, **request: Any) -> None:
        data = (json.dumps(request) + "\n").encode()
        while data:
            data = data[os.write(self._requests, data) :]

    def has_answered(self) -> bool:
        return bool(select.select([self._replies], [], [], 0)[0]) and bool(os.read(self._replies, 1))

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._replies)
        _kill(self.process)


@dataclass
class _Job:
    mutant: Mutant
    tree: Path
    process: int | None
    began: float
    limit: float


class Runner:
    """Copies of the tree, and the mutants that run in them."""

    def __init__(self, root: Path, folder: Path, jobs: int, slow: float, fresh: bool, leave_out: bool) -> None:
        self._slow, self._fresh, self._leave_out = slow, fresh, leave_out
        self._honest = folder / "honest"  # the working tree may change while this runs
        shutil.copytree(root / "src", self._honest)
        self._trees = [folder / str(i) for i in range(jobs)]
        for tree in self._trees:
            for name in ("src", "tests"):
                shutil.copytree(root / name, tree / name)
            for entry in root.iterdir():
                if entry.name not in ("src", "tests", ".git", ".hypothesis", "build"):
                    (tree / entry.name).symlink_to(entry)
        self._free = list(self._trees)
        self._running: list[_Job] = []
        self._kills: Counter[str] = Counter()

    def baseline(self, tests: Sequence[str]) -> dict[str, float]:
        """How long every test takes without a bug; refuses tests that fail, or leaves them out if so wanted."""
        tree = self._trees[0]
        process = _fork(tree, tests, None, stop=not self._leave_out)
        if not _wait(process, _BASELINE_LIMIT):
            raise SystemExit(f"the tests took more than {_BASELINE_LIMIT:g} s: {' '.join(tests)}")
        outcome = _read(tree)
        if self._leave_out and outcome.get("took"):
            for test in outcome["failures"]:
                print(f"left out, because it fails without a bug: {test}", flush=True)
            return {test: took for test, took in outcome["took"].items() if test not in outcome["failures"]}
        if outcome.get("status") != 0:
            raise SystemExit(f"the tests fail without a bug: {outcome}\n{(tree / 'log.txt').read_text()[-2000:]}")
        return dict(outcome["took"])

    def run(
        self, planted: Sequence[Mutant], tests: Sequence[str], seconds: dict[str, float]
    ) -> Iterator[dict[str, Any]]:
        """The verdicts, as they come."""
        quick = {test: took for test, took in seconds.items() if took <= self._slow}
        limit = max(_LEAST_LIMIT, 3 * sum(quick.values()))
        self._servers = {tree: _Server(tree, tests) for tree in self._trees}
        for mutant in planted:
            while not self._free:
                yield from self._collect()
            tree = self._free.pop()
            source = (self._honest / PACKAGE.name / mutant.file).read_bytes()
            mutated = mutant.plant(source)
            # What killed a neighbour goes first, then what is quick; the verdict does not depend on the order.
            order = sorted(quick, key=lambda test: quick[test] / (1 + 20 * self._kills[test]))
            process = None
            if not self._fresh and is_exchangeable(source, mutated):
                (tree / "outcome.json").unlink(missing_ok=True)
                request = {"file": mutant.file, "source": mutated.decode(), "order": order}
                self._servers[tree].ask(mutant=request, limit=limit)
            else:
                (tree / PACKAGE / mutant.file).write_bytes(mutated)
                process = _fork(tree, tests, order)
            self._running.append(_Job(mutant, tree, process, time.monotonic(), limit))
        while self._running:
            yield from self._collect()
        for server in self._servers.values():
            server.close()

    def _collect(self) -> Iterator[dict[str, Any]]:
        time.sleep(0.01)
        for job in list(self._running):
            took = time.monotonic() - job.began
            late = False
            if job.process is None:
                ended = self._servers[job.tree].has_answered()
            else:
                ended = os.waitpid(job.process, os.WNOHANG)[0] != 0
                late = not ended and took > job.limit
                if late:
                    _kill(job.process)
            if not (ended or late):
                continue
            self._running.remove(job)
            self._free.append(job.tree)
            shutil.copy2(self._honest / PACKAGE.name / job.mutant.file, job.tree / PACKAGE / job.mutant.file)
            outcome = _read(job.tree)
            self._kills[outcome.get("failed", "")] += 1
            verdict = {0: "survived", "late": "timeout", "error": "error"}.get(outcome["status"], "killed")
            verdict = "timeout" if late else verdict
            row = {k: v for k, v in asdict(job.mutant).items() if k not in ("start", "end", "text")}
            yield {**row, "verdict": verdict, "seconds": round(took, 2), "by": outcome.get("failed", "")}


def _read(tree: Path) -> dict[str, Any]:
    path = tree / "outcome.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"failed": "the process ended", "status": -1}


def _wait(process: int, limit: float) -> bool:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if os.waitpid(process, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    _kill(process)
    return False


def _kill(process: int) -> None:
    """Ends a child and whatever it started: it leads a group of its own."""
    try:
        os.killpg(process, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)


def inside(functions: Sequence[str], file: str) -> list[range]:
    """The lines of functions and methods of these names."""
    tree = ast.parse((ROOT / PACKAGE / file).read_bytes())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in functions)
    return [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in found]


def _judged(path: Path, again: bool) -> set[tuple[str, int, int, str, str]]:
    """The mutants of a result file; without its survivors if those are to be judged again."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
    last = {tuple(row[k] for k in ("file", "line", "column", "before", "after")): row["verdict"] for row in rows}
    return {key for key, verdict in last.items() if verdict != "survived" or not again}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", action="append", help="glob below src/modelmix; may be repeated [accounting/*.py]")
    parser.add_argument("--inside", action="append", help="plant in functions of this name alone; may be repeated")
    parser.add_argument("--sample", type=int, help="plant this many mutants, drawn from all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--slow", type=float, default=1.0, help="leave out tests that take longer, in seconds of a core [1]"
    )
    parser.add_argument("--out", type=Path, default=Path("build/mutants.jsonl"))
    parser.add_argument("--resume", type=Path, help="skip what this result file has judged, and append to it")
    parser.add_argument("--again", action="store_true", help="with --resume: judge its survivors again, and only those")
    parser.add_argument("--fresh", action="store_true", help="import the package anew for every mutant: slower, surer")
    parser.add_argument(
        "--leave-out",
        action="store_true",
        help="leave out tests that fail without a bug, as on a machine of other kind",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args(arguments)

    globs = options.files or ["accounting/*.py"]
    planted: list[Mutant] = []
    for file in TESTS:
        if any(fnmatch(file, glob) for glob in globs):
            found = mutants(file, (ROOT / PACKAGE / file).read_bytes())
            lines = inside(options.inside or (), file)
            planted += [m for m in found if not options.inside or any(m.line in where for where in lines)]
    if options.sample is not None and options.sample < len(planted):
        chosen = set(random.Random(options.seed).sample(range(len(planted)), options.sample))
        planted = [mutant for i, mutant in enumerate(planted) if i in chosen]
    out: Path = options.resume or options.out
    if options.resume is not None:
        done = _judged(out, options.again)
        if options.again:
            done |= {m.key for m in planted} - _judged(out, False)
        planted = [mutant for mutant in planted if mutant.key not in done]
    if options.list:
        for mutant in planted:
            print(f"{mutant.file}:{mutant.line}: {mutant.operator}: {mutant.before} -> {mutant.after}")
        print(len(planted), "mutants")
        return 0

    for name in PRELOADED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    out.parent.mkdir(parents=True, exist_ok=True)
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, out.open("a" if options.resume else "w") as file_out:
        runner = Runner(ROOT, Path(folder).resolve(), options.jobs, options.slow, options.fresh, options.leave_out)
        for file in dict.fromkeys(mutant.file for mutant in planted):
            tests = [test for test in TESTS[file] if (ROOT / test).exists()]
            seconds = runner.baseline(tests)
            for row in runner.run([m for m in planted if m.file == file], tests, seconds):
                counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
                file_out.write(json.dumps(row) + "\n")
                file_out.flush()
                if row["verdict"] != "killed":
                    print(f"{row['verdict']}: {file}:{row['line']}: {row['before']} -> {row['after']}", flush=True)
            print(f"{file}: {counts}", flush=True)
    print(f"{sum(counts.values())} planted: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
