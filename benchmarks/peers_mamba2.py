"""Calls of the published Mamba-2 kernels (vLLM, and the reference implementation's verification).

With dt = softplus(dt_raw + dt_bias) of a head and A < 0, S [P, N] being its state:

    S_t = exp(A dt_t) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

B and C are shared by the heads of one of G groups. State [slots, H, P, N]; slot 0 is left alone. Heads and dims arrive as
[value heads, key heads] = [H, G] and [V, K] = [P, N].
"""

import functools
import types
from collections.abc import Sequence
from typing import Any

from benchmarks.peers_timing import WINDOW, Call

VERIFY_RECORDS = 8


class Mamba2Layer:
    """One layer's weights, pool and buffers on the GPU, and the published calls on them."""

    def __init__(self, heads: tuple[int, int], dims: tuple[int, int], batch: int, ring: int = WINDOW, slots: int = 0):
        import torch

        self.torch, self.batch, self.ring = torch, batch, ring
        (self.h, self.g), (self.p, self.n) = heads, dims
        self.pool = 1 + (slots or batch)
        # per head and expanded with stride 0: how the kernels are told that nothing varies within a head
        self.a = torch.empty(self.h, device="cuda").uniform_(-2, -0.1)[:, None, None].expand(-1, self.p, self.n)
        self.dt_bias = torch.empty(self.h, device="cuda").uniform_(-3, 0)[:, None].expand(-1, self.p)
        self.d = torch.randn(self.h, device="cuda")[:, None].expand(-1, self.p)
        self.state = torch.randn(self.pool, self.h, self.p, self.n, device="cuda").mul_(0.1)
        self.slots = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")

    def noise(self, *shape: int) -> Any:
        return self.torch.randn(*shape, dtype=self.torch.bfloat16, device="cuda").mul_(0.1)

    def full(self, value: int, rows: int = 0, dtype: Any = None) -> Any:
        return self.torch.full((rows or self.batch,), value, dtype=dtype or self.torch.int32, device="cuda")

    def table(self, count: int) -> Any:
        """[B, T] slots of the states of each row's tokens."""
        return 1 + self.torch.arange(self.batch * count, dtype=self.torch.int32, device="cuda").view(self.batch, count)

    def tokens(self, count: int = 1) -> Any:
        """Random bfloat16 inputs of ``count`` tokens a row, rows after one another: [B T, ...]."""
        torch, total = self.torch, self.batch * count
        channels = [self.h * self.p, self.g * self.n, self.g * self.n]
        token = types.SimpleNamespace(count=count, channels=sum(channels))
        token.packed = torch.randn(total, sum(channels), dtype=torch.bfloat16, device="cuda")
        x, b, c = token.packed.split(channels, dim=1)
        token.x, token.b, token.c = x.view(total, self.h, self.p), b.view(total, self.g, self.n), c.view(total, self.g, self.n)
        token.dt_raw = torch.randn(total, self.h, dtype=torch.bfloat16, device="cuda")
        token.dt = token.dt_raw[:, :, None].expand(-1, -1, self.p)
        token.out = torch.empty(total, self.h, self.p, dtype=torch.bfloat16, device="cuda")
        token.starts = torch.arange(0, total + 1, count, dtype=torch.int32, device="cuda")
        return token

    def records(self) -> Any:
        """Random rings of the standard replay kernel, and its scratch."""
        torch = self.torch
        ring = types.SimpleNamespace(x=self.noise(self.pool, self.h, self.ring, self.p))
        ring.dt = torch.rand(self.pool, self.h, self.ring, device="cuda").mul_(0.1)
        ring.b = self.noise(self.pool, self.g, self.ring, self.n)
        ring.scratch = torch.empty(self.batch, self.g, self.ring, device="cuda")
        return ring

    def recurrent(self, token: Any, table: Any = None, accepted: Any = None) -> Any:
        """Tokens through the plain recurrence with vLLM's tuned configuration.

        Args:
            table: None for one token a row in place; [B, T] slots for T tokens a row, a state written after each.
            accepted: with a table, [B] tokens kept of the last draft, at least 1: the state to start from is in that column.
        """
        from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update

        indices = self.slots if table is None else table
        selective_state_update(
            self.state,
            token.x,
            token.dt,
            self.a,
            token.b,
            token.c,
            self.d,
            self.dt_bias,
            dt_softplus=True,
            state_batch_indices=indices,
            dst_state_batch_indices=indices,
            out=token.out,
            num_accepted_tokens=accepted,
            cu_seqlens=None if table is None else token.starts,
        )
        return token.out

    def replay(self, token: Any, ring: Any, write_pos: Any, flush: Any) -> Any:
        """One token through vLLM's replay kernel; rows whose flag is set fold their records and the token."""
        from vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_output_only import (
            selective_state_update_replayssm_output_only,
        )

        return selective_state_update_replayssm_output_only(
            self.state,
            token.x,
            token.dt,
            self.a,
            token.b,
            token.c,
            self.d,
            self.dt_bias,
            dt_softplus=True,
            x_cache=ring.x,
            dt_cache=ring.dt,
            B_cache=ring.b,
            bc_pre=ring.scratch,
            write_pos=write_pos,
            is_flush=flush,
            max_cache_len=self.ring,
            state_batch_indices=self.slots,
            out=token.out,
        )

    def verify_rings(self, token: Any) -> Any:
        """Random rings of the verification: convolved channels, raw dt as it came, and its scratch. Cursors are per slot."""
        torch = self.torch
        ring = types.SimpleNamespace(packed=self.noise(self.pool, self.ring, token.channels))
        ring.dt = self.noise(self.pool, self.h, self.ring)
        columns = 1 << (token.count - 1).bit_length()
        ring.scratch = torch.empty(self.batch, self.g, self.ring, columns, dtype=torch.bfloat16, device="cuda")
        ring.origin = self.full(0, self.pool)
        return ring

    def verify(self, token: Any, ring: Any, write_pos: Any, flags: Any) -> Any:
        """T tokens a row through the reference implementation's verification; flagged rows fold their records too."""
        from vllm.model_executor.layers.mamba.ops.selective_state_update_replayssm_spec import (
            selective_state_update_replayssm_spec,
        )

        return selective_state_update_replayssm_spec(
            state_checkpoint=self.state,
            post_conv_cache=ring.packed,
            dt_cache=ring.dt,
            conv_out=token.packed,
            dt_spec=token.dt_raw,
            A=self.a,
            write_pos=write_pos,
            post_conv_state_pos=ring.origin,
            is_flush=flags,
            query_start_loc=token.starts,
            state_batch_indices=self.slots,
            max_cache_len=self.ring,
            max_spec_len=token.count,
            d_inner=self.h * self.p,
            ngroups=self.g,
            dstate=self.n,
            D=self.d,
            dt_bias=self.dt_bias,
            dt_softplus=True,
            out=token.out,
            bc_pre=ring.scratch,
        )


def step_calls(family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, records: Sequence[int]) -> list[Call]:
    """The recurrent step, replay at each number of records, and its flush."""
    layer = Mamba2Layer(heads, dims, batch)
    token, ring = layer.tokens(), layer.records()
    calls = [Call("recurrent", "step", functools.partial(layer.recurrent, token))]
    for count in [*records, WINDOW - 1]:
        flags = layer.full(int(count == WINDOW - 1), dtype=layer.torch.int8)
        run = functools.partial(layer.replay, token, ring, layer.full(count), flags)
        calls.append(Call("published_replay", "step", run, records=count, flush=count == WINDOW - 1))
    return calls


def verify_calls(family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, tokens: Sequence[int]) -> list[Call]:
    """Replay verification after VERIFY_RECORDS committed records, without and with the fold of those records."""
    calls = []
    for count in tokens:
        layer = Mamba2Layer(heads, dims, batch, max(WINDOW, 1 << (VERIFY_RECORDS + count - 1).bit_length()))
        token = layer.tokens(count)
        ring, write_pos = layer.verify_rings(token), layer.full(VERIFY_RECORDS, layer.pool)
        for flush in (False, True):
            run = functools.partial(layer.verify, token, ring, write_pos, layer.full(int(flush), layer.pool, layer.torch.int8))
            calls.append(Call("published_replay", "verify", run, count, VERIFY_RECORDS, flush))
    return calls


def snapshot_calls(family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, tokens: Sequence[int]) -> list[Call]:
    """Verification that writes a state per token."""
    layer = Mamba2Layer(heads, dims, batch, slots=batch * max(tokens))
    calls = []
    for count in tokens:
        run = functools.partial(layer.recurrent, layer.tokens(count), layer.table(count), layer.full(1))
        calls.append(Call("snapshots", "verify", run, count))
    return calls
