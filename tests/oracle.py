"""An independent model of a pool: float64 NumPy, one token at a time, and no idea of rings, windows or pointers.

A slot is the state of all its committed tokens and the drafts of its last verify that can still be committed.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from replayssm_jax import Recurrence, Tokens


class Token(NamedTuple):
    """One token of one row in float64."""

    q: np.ndarray  # [G, K]
    k: np.ndarray  # [G, K]
    v: np.ndarray  # [H, V]
    log_decay: np.ndarray  # [H] or [H, K]
    beta: np.ndarray  # [H]


def token_at(tokens: Tokens, row: int, index: int) -> Token:
    """Token ``index`` of row ``row``, factors multiplied in."""

    def pick(name):
        x = getattr(tokens, name)
        return None if x is None else np.asarray(x[row, index]).astype(np.float64)

    q, k, q_scale, k_scale = pick("q"), pick("k"), pick("q_scale"), pick("k_scale")
    if q_scale is not None:
        q = q * q_scale[:, None]
    if k_scale is not None:
        k = k * k_scale[:, None]
    return Token(q, k, pick("v"), pick("log_decay"), pick("beta"))


def advance(recurrence: Recurrence, state: np.ndarray, token: Token) -> tuple[np.ndarray, np.ndarray]:
    """S_t [H, V, K] and o_t [H, V] from S_{t-1}, head by head as the equation reads."""
    after, out = np.empty_like(state), np.empty(state.shape[:2])
    for h in range(recurrence.num_value_heads):
        g = h // (recurrence.num_value_heads // recurrence.num_key_heads)
        decayed = state[h] * np.exp(token.log_decay[h])  # a scalar, or one factor per column
        known = decayed @ token.k[g] if recurrence.delta_rule else 0.0
        after[h] = decayed + np.outer(token.beta[h] * (token.v[h] - known), token.k[g])
        out[h] = after[h] @ token.q[g]
    return after, out


def run(recurrence: Recurrence, state: np.ndarray, tokens: Tokens, row: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """All T tokens of a row. The state [H, V, K] after them and the outputs [T, H, V]."""
    outs = []
    for i in range(tokens.q.shape[1]):
        state, out = advance(recurrence, state, token_at(tokens, row, i))
        outs.append(out)
    return state, np.stack(outs)


@dataclasses.dataclass
class OraclePool:
    """A pool of slots. Methods mirror the library's; every mask and padding rule is spelled out with a Python ``if``."""

    recurrence: Recurrence
    num_slots: int

    def __post_init__(self):
        self.state = np.zeros((self.num_slots, *self.recurrence.state_dims))
        self.position = np.zeros(self.num_slots, np.int64)
        self.drafts: list[list[Token]] = [[] for _ in range(self.num_slots)]

    def real(self, slot: int) -> bool:
        return 0 <= slot < self.num_slots

    def verify(self, tokens: Tokens, slots, lengths) -> np.ndarray:
        out = np.zeros(np.shape(tokens.v))
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            if not self.real(slot) or length == 0:
                continue
            self.drafts[slot] = [token_at(tokens, row, i) for i in range(length)]
            state = self.state[slot]
            for i, token in enumerate(self.drafts[slot]):
                state, out[row, i] = advance(self.recurrence, state, token)
        return out

    def commit(self, accepted, slots) -> None:
        for slot, count in zip(slots, accepted, strict=True):
            if not self.real(slot):
                continue
            assert count <= len(self.drafts[slot]), "the test accepts tokens that were never verified"
            for token in self.drafts[slot][:count]:
                self.state[slot], _ = advance(self.recurrence, self.state[slot], token)
            self.drafts[slot] = self.drafts[slot][count:]
            self.position[slot] += count

    def prefill(self, tokens: Tokens, slots, lengths) -> np.ndarray:
        out = self.verify(tokens, slots, lengths)
        for slot, length in zip(slots, lengths, strict=True):
            if self.real(slot) and length:
                self.commit([length], [slot])
        return out

    def reset(self, slots) -> None:
        for slot in filter(self.real, slots):
            self.state[slot], self.position[slot], self.drafts[slot] = 0.0, 0, []

    def copy_slots(self, source, target) -> None:
        pairs = [(s, t) for s, t in zip(source, target, strict=True) if self.real(s) and self.real(t)]
        read = [(self.state[s].copy(), self.position[s], list(self.drafts[s])) for s, _ in pairs]
        for (_, t), (state, position, drafts) in zip(pairs, read, strict=True):
            self.state[t], self.position[t], self.drafts[t] = state, position, drafts
