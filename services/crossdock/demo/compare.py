"""The criteria of the demo, as pure functions of logits and tokens.

fp32. Every greedily generated token is equal, and no teacher-forced logit differs by more than MAX_FP32_DIFFERENCE
(logits have a standard deviation of about 3).

bf16. Sums run in another order than in `transformers`, so tokens near a tie may differ. The yardstick is a float32 run
of the same weights, and what rounding does to the plain bf16 model itself:
* noise = NOISE_FACTOR x the plain model's largest logit error against float32. Wherever the plain model's best token
  leads by more than that, the remote model must choose it too; at least MIN_CLEAR_SHARE of all positions are so clear.
* the remote model's root-mean-square logit error against float32, over all logits, is no larger than the plain model's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_FP32_DIFFERENCE = 1e-3
NOISE_FACTOR = 2.0
MIN_CLEAR_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        tokens: "equal/compared".
        max_difference: largest |remote - plain| of any logit.
        detail: the numbers behind the criteria, in a few words.
        failures: the criteria that were not met; empty = good.
    """

    tokens: str
    max_difference: float
    detail: str
    failures: tuple[str, ...]


def judge_fp32(
    plain_tokens: torch.Tensor, remote_tokens: torch.Tensor, plain: torch.Tensor, remote: torch.Tensor
) -> Comparison:
    """Compare two float32 runs.

    Args:
        plain_tokens, remote_tokens: int64 [B, G], greedily generated.
        plain, remote: float32 [B, S, V], teacher-forced logits.
    """
    num_equal, num_tokens = int((plain_tokens == remote_tokens).sum()), plain_tokens.numel()
    difference = _max(remote - plain)
    failures = []
    if num_equal != num_tokens:
        failures.append(f"{num_tokens - num_equal} of {num_tokens} generated tokens differ")
    if not difference <= MAX_FP32_DIFFERENCE:
        failures.append(f"logits differ by {difference:.3g}, expected at most {MAX_FP32_DIFFERENCE:g}")
    detail = f"{num_tokens} tokens generated greedily; logits may differ by {MAX_FP32_DIFFERENCE:g}"
    return Comparison(f"{num_equal}/{num_tokens}", difference, detail, tuple(failures))


def judge_bf16(exact: torch.Tensor, plain: torch.Tensor, remote: torch.Tensor) -> Comparison:
    """Compare two bfloat16 runs with each other and with a float32 run of the same weights.

    Args:
        exact, plain, remote: float32 [B, S, V], teacher-forced logits.
    """
    noise = NOISE_FACTOR * _max(plain - exact)
    best = plain.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > noise
    equal = (plain.argmax(-1) == remote.argmax(-1)) & clear
    num_clear, num_equal, num_all = int(clear.sum()), int(equal.sum()), clear.numel()
    plain_error, remote_error = _rms(plain - exact), _rms(remote - exact)
    failures = []
    if num_equal != num_clear:
        failures.append(f"{num_clear - num_equal} of {num_clear} clear tokens differ (noise {noise:.3g})")
    if num_clear < MIN_CLEAR_SHARE * num_all:
        failures.append(f"only {num_clear} of {num_all} positions are clear of noise {noise:.3g}")
    if not remote_error <= plain_error:
        failures.append(f"rms logit error {remote_error:.4g}, expected at most the plain model's {plain_error:.4g}")
    detail = (
        f"teacher-forced; {num_clear} of {num_all} tokens lead by more than the noise {noise:.2g}; "
        f"rms logit error against float32 {remote_error:.4f}, of the plain model {plain_error:.4f}"
    )
    return Comparison(f"{num_equal}/{num_clear}", _max(remote - plain), detail, tuple(failures))


def _max(difference: torch.Tensor) -> float:
    return float(difference.abs().max())


def _rms(difference: torch.Tensor) -> float:
    return float(difference.double().square().mean().sqrt())
