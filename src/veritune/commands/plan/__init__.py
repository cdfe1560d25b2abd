"""Memory and time of a GRPO step, counted from a model's shapes before anything is loaded.

from veritune.commands.plan import PlanConfig, make_plan
make_plan(PlanConfig(model="Qwen/Qwen2.5-Math-1.5B", device="h200", max_tokens=1024)).largest_microbatch
"""

from veritune.commands.plan.config import PlanConfig
from veritune.commands.plan.planning import Plan, make_plan

__all__ = ["Plan", "PlanConfig", "make_plan"]
