"""What a span says of a generation, by OpenTelemetry's words for generative AI. Names and counts: never what was said."""

from __future__ import annotations

from inference_gateway.domain.generation import Usage
from inference_gateway.domain.several import Ends
from treadle.chassis.tracing import Attribute, annotate


def tell_asked(operation: str, model: str, request_id: str) -> None:
    """A request is understood. operation: chat, text_completion or embeddings."""
    annotate(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "treadle",
            "gen_ai.request.model": model,
            "treadle.request_id": request_id,
        }
    )


def tell_answered(ends: Ends) -> None:
    """An answer is over, complete or not."""
    memory = tuple(f"{report.name}@{report.version[:12]}" for report in ends.memory)
    told: dict[str, Attribute] = {"treadle.degraded": ends.degraded, "gen_ai.response.finish_reasons": ends.reasons}
    annotate(told | ({"treadle.memory": memory} if memory else {}))
    tell_used(ends.usage)


def tell_used(usage: Usage) -> None:
    """Tokens that were used."""
    annotate({"gen_ai.usage.input_tokens": usage.prompt_tokens, "gen_ai.usage.output_tokens": usage.completion_tokens})
