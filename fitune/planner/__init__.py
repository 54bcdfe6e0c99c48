"""From what is wanted and what there is to one plan, with its reasons. See `make_plan`."""

from fitune.planner.make import DataFacts, PlanContext, make_plan
from fitune.planner.result import PlanResult

__all__ = ["DataFacts", "PlanContext", "PlanResult", "make_plan"]
