"""Fixtures of the contract suite: `pytest tests/contract --stage part4_worker` (or a path to a stage's
directory).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
REPO = Path(__file__).resolve().parents[2]
if str(REPO) not in sys.path:
    sys.path.insert(0, str(REPO))

import pytest  # noqa: E402

from tests.contract.harness import Engines, Stage, Zoo  # noqa: E402
from tests.contract.subset import is_chosen, is_second_time  # noqa: E402


def pytest_addoption(parser):
    parser.addoption(
        "--stage",
        action="append",
        default=None,
        help="stage to test: a name under stages/ or a path; may be repeated; default: all",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(*features): run only for stages that have these features")


def _stages(config) -> list[Stage]:
    names = config.getoption("--stage", default=None)
    if not names:
        names = sorted(
            path.parent.name
            for path in (REPO / "stages").glob("*/stage.toml")
            if (path.parent / "engine.py").exists()
        )
    stages = [Stage(name) for name in names]
    return [made for stage in stages for made in (stage, *stage.without_overlap())]


def pytest_generate_tests(metafunc):
    if "stage" in metafunc.fixturenames:
        if not hasattr(metafunc.config, "contract_stages"):
            metafunc.config.contract_stages = _stages(metafunc.config)
        stages = metafunc.config.contract_stages
        metafunc.parametrize("stage", stages, ids=[s.id for s in stages], indirect=True, scope="session")


def _needed(item: pytest.Item) -> set[str]:
    """Features that a test is marked with, and those that its parameters ask for."""
    wanted = {feature for mark in item.iter_markers("needs") for feature in mark.args}
    params = item.callspec.params
    if (tree := params.get("tree")) is not None:
        wanted |= {"eagle", "spec_scheduler"}  # the suite looks into every round
        if tree[1] > 1:
            wanted |= {"tree", "page_tree"} if params.get("page", 1) > 1 else {"tree"}
    wanted |= getattr(params.get("spec"), "needs", set())
    if params.get("topk", 1) > 1:
        wanted.add("tree")
    return wanted


def pytest_collection_modifyitems(config, items):
    """Drop the pairs of test and stage whose feature the stage lacks (its refusal is tested by
    test_refusals.py), and where no stage was asked for by name also what subset.py leaves to others.
    """
    kept, dropped = [], []
    everything = bool(config.getoption("--stage", default=None))
    for item in items:
        stage = getattr(item, "callspec", None) and item.callspec.params.get("stage")
        test = (item.path.name, getattr(item, "originalname", item.name))
        runs = not isinstance(stage, Stage) or (  # other folders' tests come by here too
            stage.has(*_needed(item))
            and (everything or is_chosen(stage, *test))
            and not is_second_time(stage, *test)
        )
        (kept if runs else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def stage(request) -> Stage:
    return request.param


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Zoo:
    made = Zoo(tmp_path_factory.mktemp("zoo"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def engines(stage, zoo) -> Engines:
    made = Engines(stage, zoo)
    yield made
    made.close()
