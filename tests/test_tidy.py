"""The house rules, applied to the project and, with planted breaches, to themselves."""

from pathlib import Path

import pytest

from tests.tidy import layers, shape, writing
from tests.tidy.tree import Rule, read_tree

ROOT = Path(__file__).parent.parent
RULES = {rule.breaches.__name__: rule for rule in layers.RULES + shape.RULES + writing.RULES}
README = {"README.md": ""}


def lines(count: int) -> str:
    return "    x = 1\n" * count


# Rule, a project that breaks it once, and the place of the breach.
PLANTED = [
    ("upward_imports", {"unimem_jax/plan.py": "from unimem_jax.memory import Memory"}, 1),
    ("upward_imports", {"unimem_jax/plan.py": "def f():\n    import jax.numpy as jnp"}, 2),
    ("upward_imports", {"unimem_jax/plan.py": "\nfrom .pallas_kernels import rows"}, 2),
    ("upward_imports", {"unimem_jax/step.py": "import unimem_jax.models.layers"}, 1),
    ("upward_imports", {"unimem_jax/step.py": "from tests import twins"}, 1),
    ("upward_imports", {"unimem_jax/novel.py": ""}, 1),
    ("upward_imports", {"pallas_kernels/rows.py": "from unimem_jax.errors import UsageError"}, 1),
    ("upward_imports", {"models/a.py": "from unimem_jax.allocator import Allocator"}, 1),
    (
        "upward_imports",
        {"unimem_jax/spec.py": "from unimem_jax import plan", "unimem_jax/plan.py": ""},
        1,
    ),
    ("names_of_models", {"unimem_jax/load.py": "NAME = 'unimem_jax.models.embedded'"}, 1),
    ("absolute_siblings", {"examples/loop.py": "import models.layers"}, 1),
    ("absolute_siblings", {"unimem_jax/store.py": "from pallas_kernels import rows"}, 1),
    ("absolute_siblings", {"models/a.py": "from unimem_jax.models.b import B"}, 1),
    (
        "cycles",
        {
            "models/a.py": "from .b import B",
            "models/b.py": "from . import c",
            "models/c.py": "def f():\n    from .a import A",
        },
        1,
    ),
    ("long_modules", {"bench/a.py": "x = 1\n" * 401}, 1),
    ("long_functions", {"unimem_jax/plan.py": "\ndef f():\n" + lines(60)}, 2),
    ("long_functions", {"pallas_kernels/a.py": "def a_kernel():\n" + lines(120)}, 1),
    ("many_parameters", {"models/a.py": "def f(a, b, c, d, e, f, *, g): ..."}, 1),
    ("wide_lines", {".ci/run": "#" * 101}, 1),
    ("banned_names", {"unimem_jax/plan.py": "class PageManager: ..."}, 1),
    ("banned_names", {"unimem_jax/plan.py": "class BaseViews: ..."}, 1),
    ("banned_names", {"unimem_jax/plan.py": "def _process_pages(): ..."}, 1),
    ("banned_names", {"unimem_jax/plan.py": "def f(num_pages): ..."}, 1),
    ("banned_names", {"unimem_jax/plan.py": "for tmp in (): ..."}, 1),
    ("banned_names", {"unimem_jax/plan.py": "data: int = 0"}, 1),
    ("banned_names", {"models/utils.py": ""}, 1),
    ("missing_docstrings", {"tests/test_a.py": "x = 1"}, 1),
    ("missing_docstrings", {"unimem_jax/plan.py": "'''Plan.'''\ndef plan(): ..."}, 2),
    (
        "missing_docstrings",
        {"pallas_kernels/a.py": "'''A.'''\nclass A:\n    '''A.'''\n    def of(self): ..."},
        4,
    ),
    ("bare_excepts", {"bench/a.py": "try:\n    f()\nexcept:\n    pass"}, 3),
    ("environment_reads", {"unimem_jax/plan.py": "import os\nos.environ['P']"}, 2),
    ("terse_test_names", {"tests/test_a.py": "def test_moves(): ..."}, 1),
    ("dead_links", {"docs/A.md": "# A\n[b](B.md)"}, 2),
    ("dead_links", {"README.md": "[a](docs/A.md#not-there)", "docs/A.md": "# There"}, 1),
    ("dead_links", {"README.md": "```\n```\n[up](../beside.md)"}, 3),
    ("long_readme", {"README.md": "\n" * 200}, 200),
    ("stray_words", {"docs/A.md": "written in an earlier session"}, 1),
    ("stray_words", {"unimem_jax/plan.py": "# see ../shared/PLAN.md"}, 1),
    ("stray_words", {".ci/run": "cd /home/me/clone"}, 1),
]

# What comes close to a breach and is none.
ALLOWED = [
    ("upward_imports", {"unimem_jax/memory.py": "from unimem_jax.plan import Plan"}),
    ("upward_imports", {"unimem_jax/store.py": "from unimem_jax.pallas_kernels import rows"}),
    ("upward_imports", {"models/a.py": "from unimem_jax.spec import Part\nimport jax"}),
    ("upward_imports", {"bench/a.py": "from unimem_jax.models import layers"}),
    ("names_of_models", {"unimem_jax/load.py": "GROUP = 'unimem_jax.models'"}),
    ("absolute_siblings", {"models/a.py": "from .b import B\nfrom unimem_jax.spec import Part"}),
    ("absolute_siblings", {"tests/test_a.py": "from unimem_jax.models.b import B"}),
    (
        "cycles",
        {
            "models/a.py": "from .b import B",
            "models/b.py": "if TYPE_CHECKING:\n    from .a import A",
        },
    ),
    ("long_functions", {"unimem_jax/plan.py": "def f():\n    '''\n" + lines(90) + "    '''"}),
    (
        "long_functions",
        {"pallas_kernels/a.py": "def f():\n  def inner():\n" + lines(100) + "  return inner"},
    ),
    ("many_parameters", {"models/a.py": "class A:\n    def f(self, a, b, c, d, e): ..."}),
    ("banned_names", {"tests/test_a.py": "def f(tmp_path): return tmp_path.data"}),
    ("banned_names", {"tests/test_a.py": "@given(st.data())\ndef f(data): ..."}),
    ("missing_docstrings", {"unimem_jax/plan.py": "'''Plan.'''\ndef _f(): ..."}),
    ("environment_reads", {"unimem_jax/cli.py": "import os\nos.environ['P']"}),
    ("dead_links", {"docs/A.md": "# On a page\n[a](#on-a-page) [b](../LICENSE)", "LICENSE": ""}),
    ("stray_words", {"tests/test_a.py": '@pytest.fixture(scope="session")'}),
]


@pytest.fixture(scope="module")
def files():
    return read_tree(ROOT)


def assert_kept(rule: Rule, files: dict[str, str]) -> None:
    breaches = list(dict.fromkeys(rule.breaches(files)))
    listing = "\n".join(f"  {breach}" for breach in breaches)
    assert not breaches, f"\nRule: {rule.sentence}.\n{listing}\nCure: {rule.cure}."


@pytest.mark.parametrize("name", RULES)
def test_the_project_keeps_the_rule(name, files):
    assert_kept(RULES[name], files)


@pytest.mark.parametrize("name, planted, line", PLANTED)
def test_the_rule_catches_a_planted_breach(name, planted, line):
    (breach,) = RULES[name].breaches(README | planted)
    assert breach.line == line


@pytest.mark.parametrize("name, allowed", ALLOWED)
def test_the_rule_allows_what_only_comes_close(name, allowed):
    assert_kept(RULES[name], README | allowed)


def test_every_rule_has_a_planted_breach():
    assert {name for name, *_ in PLANTED} == set(RULES)


def test_a_failure_names_the_rule_the_place_and_the_cure():
    with pytest.raises(AssertionError) as failure:
        assert_kept(RULES["bare_excepts"], {"bench/a.py": "try:\n    f()\nexcept:\n    pass"})
    for words in (RULES["bare_excepts"].sentence, "bench/a.py:3", RULES["bare_excepts"].cure):
        assert words in str(failure.value)


def test_host_modules_import_where_jax_is_missing(files):
    present = {layers.module_name(path) for path in files if path.endswith(".py")}
    modules = [name for name in layers.HOST_MODULES if name in present]
    assert modules
    failures = layers.failures_without_jax(modules)
    assert not failures, f"A host module does without JAX: move what needs it up.\n{failures}"


def test_a_host_module_that_needs_jax_is_caught(tmp_path):
    (tmp_path / "innocent.py").write_text("import json")
    (tmp_path / "planted.py").write_text("import jax.numpy")
    failures = layers.failures_without_jax(["innocent", "planted"], tmp_path)
    assert [line.split("\t")[0] for line in failures.splitlines()] == ["planted"]
