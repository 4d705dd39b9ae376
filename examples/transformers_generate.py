"""Replace ``model.generate(...)`` of transformers by a call that batches prompts with speculative decoding."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.models.files.hub import resolve
from paceline.transformers import generate

# The file that `make setup` fetched (GGUF files need accelerate); any model of transformers will do, by its hub name.
path = resolve("smollm2-135m")
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token

prompts = tokenizer(["red, green, blue, red, green,", "The capital of France is"], padding=True, return_tensors="pt")
# prompt_lookup_num_tokens drafts by n-gram lookup; assistant_model=... drafts with a smaller model.
answers = generate(model, **prompts, prompt_lookup_num_tokens=4, max_new_tokens=12, do_sample=False)
for text in tokenizer.batch_decode(answers, skip_special_tokens=True):
    print(repr(text))
