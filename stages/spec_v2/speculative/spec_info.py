"""Which speculative algorithm runs, and who runs it. Restates sglang/srt/speculative/spec_info.py."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from .spec_registry import CustomSpecAlgo, get_spec, register_algorithm

if TYPE_CHECKING:
    from ..server_args import ServerArgs
    from .base_spec_worker import BaseSpecWorker
    from .spec_registry import WorkerFactory


class SpeculativeAlgorithm(Enum):
    """Algorithms that are built in. Those whose flags are refused so far have their names reserved."""

    EAGLE = auto()  # NEXTN too, which server_args.py turns into this one, as upstream does since #4033
    EAGLE3 = auto()
    STANDALONE = auto()
    NGRAM = auto()
    NONE = auto()

    def is_none(self) -> bool:
        return self == SpeculativeAlgorithm.NONE

    def is_speculative(self) -> bool:
        return self != SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        """Whether the draft's KV at p depends on token p + 1, and hidden states of every row are wanted."""
        return self in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)

    def is_eagle3(self) -> bool:
        return self == SpeculativeAlgorithm.EAGLE3

    def supports_overlap(self) -> bool:
        return True

    @staticmethod
    def from_string(name: str | None) -> SpeculativeAlgorithm | CustomSpecAlgo:
        """By a name in any case, None for none.

        Raises:
            ValueError: there is no such algorithm.
        """
        upper = "NONE" if name is None else ALIASES.get(name.upper(), name.upper())
        if upper in SpeculativeAlgorithm.__members__:
            return SpeculativeAlgorithm[upper]
        if (spec := get_spec(upper)) is not None:
            return spec
        raise ValueError(f"Unknown speculative algorithm name: {name}")

    @classmethod
    def register(
        cls,
        name: str,
        *,
        supports_overlap: bool = False,
        validate_server_args: Callable[[ServerArgs], None] | None = None,
        spec_class: type = CustomSpecAlgo,
    ) -> Callable[[WorkerFactory], WorkerFactory]:
        """A decorator that adds an algorithm from outside the package:

            @SpeculativeAlgorithm.register("MINE", supports_overlap=True)
            def make(server_args):
                return MyWorker  # a subclass of BaseSpecWorker

        Args:
            name: what `speculative_algorithm` will be called, in any case.
            supports_overlap: the worker reads nothing on the host that a step in flight has yet to give.
            validate_server_args: raises ValueError for flags that it cannot do with.
            spec_class: answers what the engine asks an algorithm; CustomSpecAlgo or what is like it.

        Raises:
            ValueError: the name is reserved, or taken.
            TypeError: spec_class lacks a method that the built-in algorithms have.
        """
        reserved = {*cls.__members__, *ALIASES}
        interface = [n for n in vars(cls) if n.startswith(("is_", "supports_"))]
        return register_algorithm(
            name, reserved, interface, supports_overlap, validate_server_args, spec_class
        )

    def create_worker(self, server_args: ServerArgs) -> type[BaseSpecWorker]:
        """The class that runs this algorithm."""
        from .adaptive_worker import AdaptiveEAGLEWorker
        from .eagle_worker_v2 import EAGLEWorkerV2
        from .multi_layer_eagle_worker_v2 import MultiLayerEagleWorkerV2
        from .ngram_worker import NGRAMWorker
        from .standalone_worker_v2 import StandaloneWorkerV2

        others = {"STANDALONE": StandaloneWorkerV2, "NGRAM": NGRAMWorker}
        eagle = AdaptiveEAGLEWorker if server_args.speculative_adaptive else EAGLEWorkerV2
        if server_args.enable_multi_layer_eagle:
            eagle = MultiLayerEagleWorkerV2
        return others.get(self.name, eagle)


ALIASES: dict[str, Any] = {"NEXTN": "EAGLE"}
