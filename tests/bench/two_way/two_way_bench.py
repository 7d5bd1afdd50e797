"""Top-k 0.1 % both ways with fp16 values against the same run uncompressed: bytes as the shard servers count them, headers
and all, and validation loss after the same steps. The model, data, servers and workers are the quickstart's.

  tests/bench/run two_way [--steps=400] [--seeds=1] [--lr=6e-3] [--decay=1]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "client/examples/gpt"))

from quickstart import DENSE, TWO_WAY, Plan, execute, summarize, tuned

FP16_BYTES = 2
FEWER_BYTES = 333.0  # than fp16: BytePS-Compress's figure for BERT
LOSS_RATIO = 1.005


def row(case: str, value: float, unit: str, ratio: float, ratio_to: str, target: float, met: bool) -> dict:
    return {"case": case, "value": value, "unit": unit, "ratio": ratio, "ratio_to": ratio_to, "target": target, "met": met}


def rows_of(dense: dict, two_way: dict) -> list[dict]:
    fp16 = FP16_BYTES * two_way["parameters"]
    rows = []
    for way in ("push", "pull"):
        per_step = two_way[f"{way}_bytes_per_step"]
        rows.append(row(f"{way}ed by one worker", per_step, "B/step", fp16 / per_step, "fp16", FEWER_BYTES,
                        fp16 / per_step >= FEWER_BYTES))
    ratio = two_way["val_loss"] / dense["val_loss"]
    rows.append(row("validation loss", two_way["val_loss"], "nats/byte", ratio, f"{dense['val_loss']:.4f} dense",
                    LOSS_RATIO, ratio <= LOSS_RATIO))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/bench/run two_way", description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, default=TWO_WAY.lr, help="of the compressed run; dense has its best one")
    parser.add_argument("--decay", type=float, default=TWO_WAY.residual_decay, help="of the workers' residuals")
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    runs = (tuned(DENSE, args.steps),
            replace(TWO_WAY, lr=args.lr, residual_decay=args.decay))
    plan = Plan(steps=args.steps, seeds=tuple(range(1, args.seeds + 1)), runs=runs, evaluations=4)
    summaries = {run.name: summarize(run, [execute(run, seed, plan) for seed in plan.seeds], plan) for run in runs}
    rows = rows_of(summaries["dense"], summaries["two_way"])
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"two_way on {machine}")
    print(f"  {plan.steps} steps, {args.seeds} seed(s); dense AdamW at learning rate {runs[0].lr:g}, beta2 {runs[0].betas[1]:g}; "
          f"{TWO_WAY.codec} both ways, pushing steps, at {args.lr:g}")
    for r in rows:
        print(f"{r['case']:<24} {r['value']:>12.4f} {r['unit']:<10} {r['ratio']:>9.4f}x to {r['ratio_to']:<16} "
              f"target {r['target']:g}  {'met' if r['met'] else 'missed'}")
    report = {"name": "two_way", "machine": machine, "rows": rows,
              "curves": {name: summary["curves"] for name, summary in summaries.items()}}
    args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
