"""fitune makes LLM fine-tuning fit the GPU a person has.

    import fitune
    fitune.plan("meta-llama/Llama-3.1-8B", gpu="rtx3080")      # the object that `fitune plan --json` prints
    fitune.predict("job.yaml")                                 # what it needs as it stands: `fitune predict --json`
    fitune.train("smollm2", data="demo", steps=10)             # the object that `fitune train --json` prints

Importing this package imports nothing else. ``fitune.plan`` and ``fitune.train`` are also the modules of those names
(``from fitune.plan import Plan`` works as always): calling the module calls the function.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # modules and functions at once, which no type can say
    plan: Any
    train: Any
    predict: Any

__version__ = "0.2.0"

_CALLS = ("plan", "train")


class _CallableModule(ModuleType):
    """A submodule that is also the function of its name in `fitune.cli.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        api = importlib.import_module("fitune.cli.api")
        return getattr(api, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """This package; the import system sets a submodule as its attribute, which is when it becomes callable."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLS and isinstance(value, ModuleType):
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name == "predict":  # a function only: there is no module of this name
        return importlib.import_module("fitune.cli.api").predict
    if name in _CALLS:
        return importlib.import_module(f"fitune.{name}")
    raise AttributeError(f"module 'fitune' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
