"""How surprised a model folder is by plain English: the check that a conversion came out right.

A wrong order of rows leaves every shape as it should be and the model still writes; the perplexity shows it.
"""

import math
from pathlib import Path

TEXT = (
    "The sun rises in the east and sets in the west. "
    "Paris is the capital of France, and it lies on the river Seine. "
    "She opened the door, walked into the kitchen, and put the kettle on. "
    "Water boils at one hundred degrees Celsius at sea level. "
    "The children played in the garden until it was time for dinner."
)


def perplexity(folder: Path) -> float:
    """exp of the mean negative log-likelihood of TEXT's tokens after the first, in float32 on the CPU.

    Uses transformers and not a stage's engine: what is checked here is what all engines are then compared on.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(TEXT, add_special_tokens=False)])  # [1, tokens]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, :-1]  # [tokens - 1, vocab]
    return math.exp(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
