"""Writes tests/data/smollm2.json, what transformers makes of SmolLM2's GGUF file: ids and 32 greedy tokens a prompt.

python tests/smollm2_reference.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf   # needs torch, transformers, gguf, accelerate
"""

import json
import sys
from pathlib import Path

PROMPTS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Write one sentence about the sea."}],
    [{"role": "system", "content": "You answer in JSON."}, {"role": "user", "content": "Name 3 colours."}],
    [{"role": "user", "content": "12 + 345 = ? 日本語 <tool>"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "Count from one to five."},
    ],
)


def main(path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(Path(path).parent), Path(path).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    rows = []
    for messages in PROMPTS:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=2, pad_token_id=2)
            logits = model(ids).logits[0, -1]
        best = torch.topk(logits, 5)
        rows.append(
            {
                "messages": messages,
                "text": text,
                "ids": ids[0].tolist(),
                "continuation": out[0, ids.shape[1] :].tolist(),
                "best": best.indices.tolist(),
                "logits": [round(x, 5) for x in best.values.tolist()],
            }
        )
    Path(__file__).with_name("data").joinpath("smollm2.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
