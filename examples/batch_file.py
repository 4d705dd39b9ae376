"""Answer a file of requests in OpenAI's batch format.

A batch that was interrupted continues where it ended: the same command with --resume.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

folder = Path(tempfile.mkdtemp())
requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"

with requests.open("w") as file:
    for number, question in enumerate(["What is the capital of France?", "Name three rivers."]):
        body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": question}], "max_tokens": 16}
        line = {"custom_id": f"q-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        file.write(json.dumps(line) + "\n")

paceline = [sys.executable, "-m", "paceline"]  # the same as the command `paceline`
model = ["smollm2-135m", "--seed", "7", "--in-order", "--quiet"]
subprocess.run([*paceline, "batch", str(requests), str(answers), *model], check=True)

for text in answers.read_text().splitlines():
    answer = json.loads(text)
    print(answer["custom_id"], repr(answer["response"]["body"]["choices"][0]["message"]["content"]))
