"""Algorithms that were registered from outside the package. Restates sglang/srt/speculative/spec_registry.py.

Nothing here knows the built-in ones: spec_info.py says which names and which methods are theirs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..server_args import PLUGIN_ALGORITHMS

if TYPE_CHECKING:
    from ..server_args import ServerArgs
    from .base_spec_worker import BaseSpecWorker

    # From the engine's flags to the class of the worker.
    WorkerFactory = Callable[[ServerArgs], type[BaseSpecWorker]]

_registry: dict[str, CustomSpecAlgo] = {}


class CustomSpecAlgo:
    """A registered algorithm, to the engine what a member of SpeculativeAlgorithm is.

    A subclass says otherwise where its method does, above all in `is_eagle`.
    """

    def __init__(self, name: str, factory: WorkerFactory, supports_overlap: bool):
        self.name, self.factory = name, factory
        self._supports_overlap = supports_overlap

    def is_none(self) -> bool:
        return False

    def is_speculative(self) -> bool:
        return True

    def is_eagle(self) -> bool:
        return False

    def is_eagle3(self) -> bool:
        return False

    def supports_overlap(self) -> bool:
        return self._supports_overlap

    def create_worker(self, server_args: ServerArgs) -> type[BaseSpecWorker]:
        """What the factory gives for these flags.

        Raises:
            ValueError: the scheduler overlaps, and the algorithm cannot.
        """
        if not self.supports_overlap():
            if server_args.overlap_schedule:
                raise ValueError(
                    f"speculative_algorithm={self.name!r} was registered without supports_overlap=True, and "
                    "the scheduler overlaps: set disable_overlap_schedule=True, or register it with it"
                )
            warnings.warn(
                f"{self.name} does not support overlap and runs synchronously, which upstream deprecates",
                DeprecationWarning,
                stacklevel=2,
            )
        return self.factory(server_args)


def register_algorithm(
    name: str,
    reserved: set[str],
    interface: list[str],
    supports_overlap: bool,
    validate_server_args: Callable[[ServerArgs], None] | None,
    spec_class: type,
) -> Callable[[WorkerFactory], WorkerFactory]:
    """See SpeculativeAlgorithm.register. An algorithm is stored when the decorator is applied."""
    upper = name.upper()

    def check() -> None:
        if upper in reserved:
            raise ValueError(f"{name!r} is reserved for a built-in algorithm: choose another name")
        if upper in _registry:
            raise ValueError(f"{name!r} is registered already: choose another name")

    check()
    if lacking := [method for method in interface if not hasattr(spec_class, method)]:
        raise TypeError(
            f"spec_class={spec_class.__name__} lacks {', '.join(lacking)}: derive it from CustomSpecAlgo"
        )

    def decorate(factory: WorkerFactory) -> WorkerFactory:
        check()  # upstream lets the second of two win
        _registry[upper] = spec_class(upper, factory, supports_overlap)
        PLUGIN_ALGORITHMS[upper] = validate_server_args
        return factory

    return decorate


def get_spec(upper: str) -> CustomSpecAlgo | None:
    """The algorithm registered under this name in upper case."""
    return _registry.get(upper)
