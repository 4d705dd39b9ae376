"""A worker without an engine, whose precision selects its behaviour; see ``Fake``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers" / "workers"))

from common import Run, serve


class Fake:
    def __init__(self, setup):
        self._how = setup.precision
        if self._how == "broken":
            raise RuntimeError("cannot load\nmore")
        print("noise on the standard output")
        os.write(1, b"noise on the descriptor\n")
        self.info = {"versions": {"fake": "1"}, "precision": self._how}
        with Path(os.environ["FAKE_LOG"]).open("a") as log:
            log.write(json.dumps({"started": self._how}) + "\n")

    def run(self, mode, prompts, max_tokens, k):
        if self._how == "refuses" and len(prompts) > 1:
            raise ValueError("batch > 1 is not supported")
        if self._how == "dies" and max_tokens > 4 and len(prompts) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "hangs" and max_tokens > 4:
            time.sleep(60)
        tokens = max_tokens - 1 if self._how == "short" and max_tokens > 4 else max_tokens
        rows = [[prompt[0]] * tokens for prompt in prompts]
        speculative = mode != "plain"
        with Path(os.environ["FAKE_LOG"]).open("a") as log:
            log.write(json.dumps({"peer": self._how, "mode": mode, "batch": len(prompts), "tokens": max_tokens}) + "\n")
        return Run(0.5, 1.5, rows, rounds=2, drafted=10 if speculative else None, accepted=7 if speculative else None)


serve(Fake)
