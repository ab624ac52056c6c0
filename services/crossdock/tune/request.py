"""A request to measure: a shape, and the number of runs. Sent to the ranks as JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from ep_kernels import Layout, Mode, MoEConfig, Overflow
from ep_kernels.config import FP8_BLOCK

PAYLOADS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "float32": {"dtype": torch.float32},
    "fp8": {"dtype": torch.bfloat16, "quantize": True},
    "fp8-rows": {"dtype": torch.float8_e4m3fn, "scale_columns": 1},
}
"""Rows as the caller gives them; fp8: bf16 that dispatch quantises; fp8-rows: fp8 with the caller's scales."""
TIMEOUT_S = 60.0


class OptionError(ValueError):
    """An option with a value that this command does not know."""


class TuneRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run of `crossdock tune`.

    Attributes:
        layouts: values of Layout, each measured by itself.
        dtype: a key of PAYLOADS.
        fp8_combine: partials travel as fp8.
        num_sms: multiprocessors that one operation may fill; None: AUTO's default.
        dispatch_sms, combine_sms: of each operation alone; None: as `num_sms`.
        max_tokens: largest step of the ladder, tokens per rank.
        runs: timed runs of each step and algorithm, of which the median counts.
        cache_dir: folder of `tuning.json`; None: as MoEConfig.
        seed: other seeds, other routing.
    """

    transport: str
    layouts: tuple[str, ...]
    num_experts: int = 256
    hidden_size: int = 7168
    topk: int = 8
    dtype: str = "bfloat16"
    fp8_combine: bool = False
    num_sms: int | None = None
    dispatch_sms: int | None = None
    combine_sms: int | None = None
    max_tokens: int = 4096
    runs: int = 15
    cache_dir: str | None = None
    seed: int = 1

    def config(self, layout: str, group: Any) -> MoEConfig:
        """Config of a communicator that can run every step of the ladder by either algorithm: M is one token more than
        the largest step, which runs LL if `step_tokens` is its own size and HT if it is M. Shapes are fixed, as in
        serving, so the host does not wait for counts. Raises ConfigError."""
        payload = dict(PAYLOADS[self.dtype])
        if payload.get("scale_columns"):
            payload["scale_columns"] = -(-self.hidden_size // FP8_BLOCK)
        return MoEConfig(
            group=group,
            num_experts=self.num_experts,
            hidden_size=self.hidden_size,
            topk=self.topk,
            max_tokens_per_rank=self.max_tokens + 1,
            mode=Mode.AUTO,
            layout=Layout(layout),
            combine_dtype=torch.float8_e4m3fn if self.fp8_combine else None,
            exact_shapes=False,
            overflow=Overflow.DROP,
            max_in_flight=1,
            timeout_s=TIMEOUT_S,
            ll_max_tokens=self.max_tokens,
            transport=self.transport,
            num_sms=self.num_sms,
            dispatch_sms=self.dispatch_sms,
            combine_sms=self.combine_sms,
            kernel_cache_dir=self.cache_dir,
            **payload,
        )
