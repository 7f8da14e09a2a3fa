"""fledge's engine at one point of SGLang's history; stage.toml says which. The door is `Engine`."""

from .engine import Engine

__all__ = ["Engine"]
