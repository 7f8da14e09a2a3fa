"""Tiny models and engines of this stage, shared by its tests."""

from __future__ import annotations

import pytest

from tests.contract.harness import Engines, Stage, Zoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Zoo:
    made = Zoo(tmp_path_factory.mktemp("zoo"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def engines(zoo) -> Engines:
    made = Engines(Stage("spec_v2"), zoo)
    yield made
    made.close()
