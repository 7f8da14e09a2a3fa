"""Which speculative algorithm runs. Restates sglang/srt/speculative/spec_info.py."""

from __future__ import annotations

from enum import IntEnum, auto


class SpeculativeAlgorithm(IntEnum):
    NONE = auto()
    EAGLE = auto()  # NEXTN too, which server_args.py turns into this one, as upstream does since #4033
    EAGLE3 = auto()

    def is_none(self) -> bool:
        return self == SpeculativeAlgorithm.NONE

    def is_eagle(self) -> bool:
        return self in (SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3)

    def is_eagle3(self) -> bool:
        return self == SpeculativeAlgorithm.EAGLE3

    @staticmethod
    def from_string(name: str | None) -> SpeculativeAlgorithm:
        return SpeculativeAlgorithm.NONE if name is None else SpeculativeAlgorithm[name]
