"""From what is wanted and what there is to one plan, with its reasons. See `make_plan`."""

from fitune.planner.context import PlanContext
from fitune.planner.lengths import DataFacts
from fitune.planner.make import make_plan
from fitune.planner.result import PlanResult

__all__ = ["DataFacts", "PlanContext", "PlanResult", "make_plan"]
