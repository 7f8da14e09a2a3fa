"""Training text written by a stage's engine, decoding without a head: what `head_data.write_text` asks to
generate.
"""

from pathlib import Path
from typing import Any

from ..bench.stages_door import resolve_stage
from .head_data import Generate, TextSettings, write_text

CALL = 2  # batches of requests per call: progress shows and little is lost, yet half the batch stays full


def engine_writer(engine: Any, end: int, prompts_per_call: int) -> Generate:
    """A `Generate` function over an engine: the end of turn stays in the answers."""

    def generate(prompts, parameters, on_finished):
        answers = []
        for start in range(0, len(prompts), prompts_per_call):
            part = slice(start, start + prompts_per_call)
            for result in engine.generate(input_ids=prompts[part], sampling_params=parameters[part]):
                answer = list(result["output_ids"])
                stopped = result["meta_info"]["finish_reason"]["type"] == "stop"
                if stopped and (not answer or answer[-1] != end):
                    answer.append(end)
                answers.append(answer)
            on_finished(len(prompts[part]))
        return answers

    return generate


def write_text_with(
    stage: str, target_folder: Path, folder: Path, settings: TextSettings, device: str, slots: int
) -> dict:
    """Let `stage` (a name or a path) write the text of `settings` to `folder`, `slots` requests at a time.

    Returns the manifest. Raises BadInput for an unknown stage or what its engine refuses, ModelError as
    `write_text` does.
    """
    with resolve_stage(stage).open(
        model_path=str(target_folder),
        device=device,
        max_running_requests=slots,
        context_length=settings.max_length,
        disable_radix_cache=True,
    ) as engine:
        tokenizer = engine.tokenizer
        generate = engine_writer(engine, tokenizer.eos_token_id, CALL * slots)
        return write_text(target_folder.name, tokenizer, generate, folder, settings)
