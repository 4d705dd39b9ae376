"""Start the server, ask it with OpenAI's client (pip install openai), and stop it.

A server that is already running needs only the part with the client.
"""

import socket
import subprocess
import sys
import time
import urllib.request

from openai import OpenAI

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]

paceline = [sys.executable, "-m", "paceline"]  # the same as the command `paceline`
limits = ["--max-batch-size", "4", "--max-model-len", "512"]
server = subprocess.Popen([*paceline, "serve", "smollm2-135m", "--port", str(port), *limits])
try:
    while True:  # /health answers 503 until the model is loaded
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            break
        except OSError:
            if server.poll() is not None:
                raise SystemExit("the server did not start") from None
            time.sleep(0.2)

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
finally:
    server.terminate()  # SIGTERM: running requests may finish
    server.wait()
