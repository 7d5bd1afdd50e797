"""The worker of the benchmark `slow_link`: pushes dense float32 gradients, a round for each line "go" on stdin.

argv[1]: its settings, as JSON. Prints "joined", then for each round time.monotonic() as it hands over the first tensor,
and "ended" when the round is over. The clock is the machine's: its times compare with those of other processes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

import gradwire
import numpy as np

SHAPE = (1 << 20,)  # of each tensor
TENSOR_BYTES = 4 << 20


@dataclass(frozen=True)
class Settings:
    servers: list[str]
    tensors: int
    encode_threads: int
    timeout_s: float  # for the start, and for each round


def run_round(session: gradwire.Session, gradients: list[np.ndarray], timeout_s: float) -> None:
    session.begin_round(0.1)
    print(time.monotonic(), flush=True)
    for t, gradient in enumerate(gradients):
        session.tensor_ready(t, gradient)
    session.end_round(timeout_s)
    print("ended", flush=True)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    tensors = [gradwire.TensorSpec(f"t{i}", SHAPE) for i in range(settings.tensors)]
    job = gradwire.JobSpec(name="slow-link", tensors=tensors, optimizer="sgd", codec="dense:fp32", push="gradient")
    parameters = [np.zeros(SHAPE, np.float32) for _ in tensors]
    gradients = [np.full(SHAPE, 0.01, np.float32) for _ in tensors]
    with gradwire.join(settings.servers, job, parameters, "worker-0", start_timeout=settings.timeout_s,
                       encode_threads=settings.encode_threads) as session:
        print("joined", flush=True)
        for line in sys.stdin:
            if line != "go\n":
                raise ValueError(f"not a command: {line!r}")
            run_round(session, gradients, settings.timeout_s)


if __name__ == "__main__":
    main()
