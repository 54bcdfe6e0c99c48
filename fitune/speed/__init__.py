"""Seconds of a training step and of a run, before anything runs: a roofline with constants fitted to measured records.

time = fitune.speed.predict(plan, config)          # StepTime: step_s, low_s, high_s, tokens_per_s, parts, bound
run = fitune.speed.job_time(time, steps=500)       # JobTime: seconds, low_s, high_s
"""

from fitune.speed.estimate import JobTime, job_time, predict
from fitune.speed.roofline import StepTime
from fitune.speed.segments import Workload

__all__ = ["JobTime", "StepTime", "Workload", "job_time", "predict"]
