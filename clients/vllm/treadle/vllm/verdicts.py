"""A step's verdicts on vLLM's own way from the process of the model to the scheduler's: an attribute of ModelRunnerOutput.

vLLM carries the object whole between its processes, as it carries all of its outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treadle.vllm.outcomes import StepVerdict

ATTRIBUTE = "treadle_verdicts"


def put_verdicts(output: Any, verdicts: Mapping[str, StepVerdict]) -> Any:
    """Lay them on the output of a step, and return it."""
    if verdicts:
        setattr(output, ATTRIBUTE, verdicts)
    return output


def verdicts_of(output: Any) -> Mapping[str, StepVerdict]:
    """Those of a step; none where it had none."""
    verdicts: Mapping[str, StepVerdict] = getattr(output, ATTRIBUTE, {})
    return verdicts
