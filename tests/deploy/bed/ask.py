"""A client, run inside a pod: `python ask.py TARGET MODEL SECONDS [SECURITY]` asks a group and checks every answer.

For about SECONDS (at least once), or until SIGTERM, rows of random tokens go through layer 1 of the Qwen3 MoE
checkpoint in MODEL; the same is computed here from the experts' weights. Prints a line `asking` after the first answer,
and at the end a line of JSON: answers, failures by name, largest error.
"""

from __future__ import annotations

import collections
import json
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from crossdock.client import Client, ClientError
from crossdock.common.security import load_security

LAYER, NUM_TOKENS, SEED = 1, 24, 7
TIMEOUT_S, PAUSE_S = 60.0, 0.05


def experts(folder: Path) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(gate [I, H], up [I, H], down [H, I]) of each expert of the layer."""
    weights = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    prefix = f"model.layers.{LAYER}.mlp.experts."
    count = sum(name.startswith(prefix) and name.endswith("up_proj.weight") for name in weights)
    parts = ("gate_proj", "up_proj", "down_proj")
    return [tuple(weights[f"{prefix}{e}.{part}.weight"] for part in parts) for e in range(count)]  # type: ignore[misc]


def main(target: str, model: str, seconds: str, security: str = "") -> None:
    """Ask until the time is over."""
    config = json.loads((Path(model) / "config.json").read_text())
    known, topk = experts(Path(model)), config["num_experts_per_tok"]
    generator = torch.Generator().manual_seed(SEED)
    answers, failures, worst, ends = 0, collections.Counter[str](), 0.0, time.monotonic() + float(seconds)
    told = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    with Client(target, security=load_security(security or None)) as client:
        while not answers + sum(failures.values()) or (time.monotonic() < ends and not told.is_set()):
            x = torch.randn(NUM_TOKENS, config["hidden_size"], generator=generator)
            scores, ids = torch.rand(NUM_TOKENS, len(known), generator=generator).topk(topk)
            shares = scores / scores.sum(1, keepdim=True)
            try:
                got = client.forward(LAYER, x, ids, shares, timeout_s=TIMEOUT_S)
            except ClientError as error:
                failures[type(error).__name__] += 1
                continue
            want = torch.zeros_like(x)
            for row in range(NUM_TOKENS):
                for share, e in zip(shares[row], ids[row].tolist(), strict=True):
                    gate, up, down = known[e]
                    want[row] += share * (down @ (torch.nn.functional.silu(gate @ x[row]) * (up @ x[row])))
            if not answers:
                print("asking", flush=True)
            answers, worst = answers + 1, max(worst, float((got - want).abs().max()))
            time.sleep(PAUSE_S)
    print(json.dumps({"answers": answers, "failures": failures, "worst": worst}))


if __name__ == "__main__":
    main(*sys.argv[1:])
