"""Train a head for a target, and draft with it.

    python examples/train_head.py [OUTPUT [TOKENS EPOCHS]]

Without arguments it takes a minute, and the head has seen too little text to be useful. The defaults of
``paceline train-draft`` are 400000 tokens and 8 epochs; a killed run of that command continues with --resume.
"""

import subprocess
import sys
import tempfile

from paceline import LLM, SamplingParams

output = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
tokens, epochs = sys.argv[2:4] if len(sys.argv) > 3 else ("600", "1")
small = ["--answer-tokens", "32", "--prompt-tokens", "32", "--held-out", "2", "--shard", "4", "--vocab", "512"]
sizes = small if tokens == "600" else []

# The target writes its own data, in the precision that it will run with.
command = [sys.executable, "-m", "paceline", "train-draft", "smollm2-135m", "--quantization", "int8", "--quiet"]
wanted = ["--output", output, "--tokens", tokens, "--epochs", epochs, *sizes]
subprocess.run([*command, *wanted], check=True, stdout=subprocess.DEVNULL)

llm = LLM("smollm2-135m", draft_model=output, quantization="int8", drafter="feature", num_speculative_tokens=3)
answer = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=24), use_tqdm=False)
metrics = answer[0].outputs[0].metrics
print(repr(answer[0].outputs[0].text))
print(f"{output}: {metrics.accepted} of {metrics.drafted} draft tokens accepted")
