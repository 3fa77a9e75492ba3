"""Calls of the published Gated DeltaNet and Kimi Delta Attention kernels (vLLM and SGLang).

Both share one law, alpha and beta being gates, S [V, K] the state of a value head:

    u_t = beta_t (v_t - S_{t-1} alpha_t k_t),    S_t = S_{t-1} alpha_t + u_t k_t^T,    o_t = S_t q_t / sqrt(K)

with q and k normalised, beta = sigmoid(b) and log alpha = -exp(A_log) softplus(a + dt_bias), per head (GDN) or channel (KDA).
Their axes: state [slots, HV, V, K], HV value heads in groups that share one of H key heads. Slot 0 is left alone.
"""

import functools
import types
from collections.abc import Sequence
from typing import Any

from benchmarks.peers_timing import WINDOW, Call

VERIFY_RECORDS = 8


class DeltaLayer:
    """One layer's weights, pool and buffers on the GPU, and the published calls on them."""

    def __init__(
        self, family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, ring: int = WINDOW, slots: int = 0
    ):
        import torch

        self.torch, self.family, self.batch, self.ring = torch, family, batch, ring
        (self.hv, self.h), (self.v, self.k) = heads, dims
        self.gate = (self.k,) if family == "kda" else ()
        pool = 1 + (slots or batch)
        self.a_log = torch.empty(self.hv, device="cuda").uniform_(-2, 0)
        self.dt_bias = torch.empty(self.hv, *self.gate, device="cuda").uniform_(-1, 1)
        self.state = torch.randn(pool, self.hv, self.v, self.k, device="cuda").mul_(0.1)
        self.slots = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda")
        self.scale = self.k**-0.5
        self.cursors_at_zero = self.full(0, pool)
        self.unflagged, self.flagged = self.flags(0), self.flags(1)
        # random records: zeros would draw less power and may run at a higher clock
        self.d_cache, self.k_cache = self.noise(pool, self.hv, ring, self.v), self.noise(pool, self.h, ring, self.k)
        self.g_cache = torch.empty(pool, self.hv, ring, *self.gate, device="cuda").uniform_(-0.3, 0)

    def noise(self, *shape: int) -> Any:
        return self.torch.randn(*shape, dtype=self.torch.bfloat16, device="cuda").mul_(0.1)

    def full(self, value: int, rows: int = 0, dtype: Any = None) -> Any:
        return self.torch.full((rows or self.batch,), value, dtype=dtype or self.torch.int32, device="cuda")

    def flags(self, value: int) -> Any:
        """Flush flags of all slots."""
        return self.full(value, self.state.shape[0], self.torch.int8)

    def raw(self) -> tuple[Any, Any, Any]:
        """Rings of raw values, raw keys and betas."""
        pool = self.state.shape[0]
        beta = self.torch.rand(pool, self.hv, self.ring, device="cuda")
        return self.noise(pool, self.hv, self.ring, self.v), self.noise(pool, self.h, self.ring, self.k), beta

    def table(self, count: int) -> Any:
        """[B, T] slots of the states of each row's tokens."""
        return 1 + self.torch.arange(self.batch * count, dtype=self.torch.int32, device="cuda").view(self.batch, count)

    def tokens(self, count: int = 1) -> Any:
        """Random bfloat16 inputs of ``count`` tokens a row, [B, T, ...]."""
        torch = self.torch

        def draw(*shape: int) -> Any:
            return torch.randn(self.batch, count, *shape, device="cuda", dtype=torch.bfloat16)

        token = types.SimpleNamespace(q=draw(self.h, self.k), k=draw(self.h, self.k), v=draw(self.hv, self.v))
        token.a, token.b = draw(self.hv, *self.gate), draw(self.hv)
        token.log_decay, token.beta = self.gates(token)
        parts = [x.reshape(self.batch * count, -1) for x in (token.q, token.k, token.v)]
        token.mixed = torch.cat(parts, dim=1)
        token.out = torch.empty_like(token.v)
        token.starts = torch.arange(0, self.batch * count + 1, count, dtype=torch.int32, device="cuda")
        return token

    def gates(self, token: Any) -> tuple[Any, Any]:
        """Log decay and beta of tokens, float32."""
        a = token.a.float() + self.dt_bias
        a_log = self.a_log[:, None] if self.gate else self.a_log
        return -a_log.exp() * self.torch.nn.functional.softplus(a), token.b.float().sigmoid()

    def recurrent(self, token: Any) -> Any:
        """One token through the plain recurrence, state read and written."""
        if self.family == "kda":
            from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_kda_packed_decode as decode
        else:
            from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
                fused_recurrent_gated_delta_rule_packed_decode as decode,
            )
        rows, flat = self.batch, self.dt_bias.flatten()
        decode(
            mixed_qkv=token.mixed,
            a=token.a.view(rows, -1),
            b=token.b.view(rows, -1),
            A_log=self.a_log,
            dt_bias=flat,
            scale=self.scale,
            initial_state=self.state,
            out=token.out,
            ssm_state_indices=self.slots,
            use_qk_l2norm_in_kernel=True,
        )
        return token.out

    def replay(self, token: Any, write_pos: Any) -> Any:
        """One token through the published replay kernel; a row whose write_pos is ring - 1 flushes."""
        from sglang.kernels.ops.attention.linear.fused_recurrent_linear_replayssm import fused_recurrent_linear_replayssm_decode

        fused_recurrent_linear_replayssm_decode(
            mixed_qkv=token.mixed,
            a=token.a.view(self.batch, self.hv, *self.gate),
            b=token.b.view(self.batch, -1),
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            scale=self.scale,
            initial_state=self.state,
            d_cache=self.d_cache,
            k_cache=self.k_cache,
            g_cache=self.g_cache,
            out=token.out,
            ssm_state_indices=self.slots,
            write_pos=write_pos,
            use_qk_l2norm_in_kernel=True,
            is_kda=self.family == "kda",
        )
        return token.out

    def verify(
        self, token: Any, write_pos: Any, flags: Any, mode: str = "verify", raw: Sequence[Any] = (None, None, None)
    ) -> Any:
        """T tokens a row through SGLang's replay verification (GDN). Cursors are per slot, [slots].

        Args:
            mode: "verify" serves rows whose flag is 0, as its engine calls it; "flush" serves the others: it folds the raw
                records into the checkpoint, token by token, and verifies on the folded checkpoint.
            raw: values, keys and betas of the records, for "flush".
        """
        from sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode import gdn_replayssm_spec_decode

        flat = {name: getattr(token, name).flatten(0, 1) for name in ("q", "k", "v", "a", "b", "out")}
        gdn_replayssm_spec_decode(
            **flat,
            A_log=self.a_log,
            dt_bias=self.dt_bias,
            checkpoint_state=self.state,
            d_cache=self.d_cache,
            k_cache=self.k_cache,
            g_cache=self.g_cache,
            rawv_cache=raw[0],
            rawk_cache=raw[1],
            beta_cache=raw[2],
            query_start_loc=token.starts,
            ssm_state_indices=self.slots,
            replay_indices=self.slots,
            write_pos=write_pos,
            cache_base=self.cursors_at_zero,
            is_flush=flags,
            max_cache_len=self.ring,
            max_spec_len=token.q.shape[1],
            scale=self.scale,
            launch_mode=mode,
        )
        return token.out

    def verify_and_fold(self, token: Any, write_pos: Any) -> Any:
        """A step in which every row's records are folded after the verification."""
        out = self.verify(token, write_pos, self.unflagged)
        self.fold(write_pos, self.flagged)
        return out

    def fold(self, write_pos: Any, flags: Any) -> None:
        """SGLang's fold of all records of flagged rows into the checkpoint (GDN), its cursors left as they are."""
        from sglang.kernels.ops.attention.linear import gdn_replayssm_spec_decode as published

        # the kernel that resets the cursors runs once for all layers; without it the call can be repeated
        published._finish_gdn_replayssm_circular_fold_kernel = {(1,): lambda *args, **kwargs: None}
        published.commit_gdn_replayssm_circular(
            checkpoint_state=self.state[None],
            d_cache=self.d_cache[None],
            k_cache=self.k_cache[None],
            g_cache=self.g_cache[None],
            d_residual_cache=None,
            k_residual_cache=None,
            state_batch_indices=self.slots,
            replay_indices=self.slots,
            write_pos=write_pos,
            cache_base=self.cursors_at_zero,
            is_flush=flags,
            accept_lens=self.cursors_at_zero,
            null_block_id=0,
        )

    def snapshots(self, token: Any, table: Any, accepted: Any) -> Any:
        """T tokens a row, a state written after each (GDN).

        Args:
            table: [B, T] slots of the row's states.
            accepted: [B] tokens kept of the last draft, at least 1: the state to start from is in that column.
        """
        from vllm.third_party.flash_linear_attention.ops.fused_recurrent import fused_recurrent_gated_delta_rule

        rows = {"q": token.q, "k": token.k, "v": token.v, "g": token.log_decay, "beta": token.beta}
        return fused_recurrent_gated_delta_rule(
            **{name: x.flatten(0, 1)[None] for name, x in rows.items()},
            scale=self.scale,
            initial_state=self.state,
            inplace_final_state=True,
            cu_seqlens=token.starts,
            ssm_state_indices=table,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )[0].view(token.out.shape)


def step_calls(family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, records: Sequence[int]) -> list[Call]:
    """The recurrent step, replay at each number of records, and its flush."""
    layer = DeltaLayer(family, heads, dims, batch)
    token = layer.tokens()
    calls = [Call("recurrent", "step", functools.partial(layer.recurrent, token))]
    for count in [*records, WINDOW - 1]:
        run = functools.partial(layer.replay, token, layer.full(count))
        calls.append(Call("published_replay", "step", run, records=count, flush=count == WINDOW - 1))
    return calls


def verify_calls(family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, tokens: Sequence[int]) -> list[Call]:
    """Replay verification after VERIFY_RECORDS committed records, without and with the fold of those records.

    A ring is the smallest power of two that holds records and tokens. The fold is published twice: ``compact`` folds the
    records as matrices after the verification, ``exact`` replays raw records one by one before it.
    """
    if family == "kda":
        reason = "no replay verification of KDA is published without a state write per step"
        return [Call("published_replay", "verify", lambda: None, count, VERIFY_RECORDS, error=reason) for count in tokens]
    calls = []
    for count in tokens:
        ring = max(WINDOW, 1 << (VERIFY_RECORDS + count - 1).bit_length())
        layer = DeltaLayer(family, heads, dims, batch, ring)
        token, pool = layer.tokens(count), batch + 1
        ordinary = functools.partial(layer.verify, token, layer.full(VERIFY_RECORDS, pool), layer.unflagged)
        flush = functools.partial(layer.verify_and_fold, token, layer.full(VERIFY_RECORDS, pool))
        exact = functools.partial(layer.verify, token, layer.full(VERIFY_RECORDS, pool), layer.flagged, "flush", layer.raw())
        calls.append(Call("published_replay", "verify", ordinary, count, VERIFY_RECORDS))
        calls.append(Call("published_replay", "verify", flush, count, VERIFY_RECORDS, True, "compact"))
        calls.append(Call("published_replay", "verify", exact, count, VERIFY_RECORDS, True, "exact"))
    return calls


def snapshot_calls(family: str, heads: tuple[int, int], dims: tuple[int, int], batch: int, tokens: Sequence[int]) -> list[Call]:
    """Verification that writes a state per token (GDN)."""
    if family == "kda":
        return []
    layer = DeltaLayer(family, heads, dims, batch, slots=batch * max(tokens))
    calls = []
    for count in tokens:
        run = functools.partial(layer.snapshots, layer.tokens(count), layer.table(count), layer.full(1))
        calls.append(Call("snapshots", "verify", run, count))
    return calls
