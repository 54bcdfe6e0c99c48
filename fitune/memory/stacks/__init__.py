"""What *other* fine-tuning tools use on one GPU for the same settings, in plain Python, term by term.

``predict(settings, stack)`` for settings given in full, ``from_recipe(recipe, shape, stack)`` for a fitune recipe,
``STACKS`` for the names with one line each. How far off each is on published runs: docs/stacks.md.
"""

from __future__ import annotations

from fitune.memory.stacks import litgpt, torchtune, trainer
from fitune.memory.stacks.prediction import COMPONENTS, Phase, StackPrediction, Term
from fitune.memory.stacks.recipes import defaults_of, from_recipe
from fitune.memory.stacks.settings import StackSettings, StackShape, parse_targets
from fitune.memory.stacks.shapes import from_catalog, from_columns, from_config
from fitune.memory.stacks.tools import STACKS

__all__ = [
    "COMPONENTS", "STACKS", "Phase", "StackPrediction", "StackSettings", "StackShape", "Term", "from_catalog",
    "from_columns", "from_config", "from_recipe", "parse_targets", "predict",
]  # fmt: skip


def predict(settings: StackSettings, stack: str) -> StackPrediction:
    """Peak GPU memory of a run with another tool, per phase and component.

    Raises:
        UserError: an unknown stack (the message lists them), a weight format that is not modelled.
    """
    defaults_of(stack)
    if stack == "litgpt":
        return litgpt.predict(settings)
    if stack == "torchtune":
        return torchtune.predict(settings)
    return trainer.predict(settings, stack)
