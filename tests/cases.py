"""The case table: every geometry, policy and dtype that the contract is tried on, and the tokens to try it with.

A family or a shape that somebody needs enters here as one row; a backend enters through ``checks.IMPLEMENTATIONS`` alone.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from replayssm_jax import Recurrence, ReplayPolicy, Tokens
from replayssm_jax.checks import IMPLEMENTATIONS

__all__ = ["CASES", "FAMILIES", "IMPLEMENTATIONS", "Case", "case_named", "make_tokens", "poison_dead"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table. ``heads`` is (H, G) and ``dims`` is (V, K); ``decay`` and ``beta_max`` shape the tokens."""

    id: str
    heads: tuple[int, int]
    dims: tuple[int, int]
    delta_rule: bool
    gate: str
    window: int = 16
    max_draft: int = 4
    activations: str = "float32"
    checkpoint: str = "float32"
    readout: str = "checkpoint"
    records: str | None = None
    rounding: str = "nearest"
    factors: bool = False  # queries and keys come raw, with float32 factors that normalise them
    decay: str = "mixed"  # "mixed", "slow" (hundreds of tokens), "none" or "constant" (one per head)
    beta_max: float = 1.0

    @property
    def recurrence(self) -> Recurrence:
        return Recurrence(
            num_value_heads=self.heads[0],
            num_key_heads=self.heads[1],
            value_dim=self.dims[0],
            key_dim=self.dims[1],
            delta_rule=self.delta_rule,
            gate=self.gate,
        )

    @property
    def policy(self) -> ReplayPolicy:
        return ReplayPolicy(
            window=self.window,
            max_draft=self.max_draft,
            checkpoint_dtype=self.checkpoint,
            record_dtype=self.activations,
            readout=self.readout,
            records=self.records,
            rounding=self.rounding,
        )

    @property
    def state_tolerance(self) -> float:
        """Relative L2 error allowed in a head's state: float32 arithmetic, or one rounding of the checkpoint per flush."""
        return {"float32": 2e-6, "float16": 3e-3, "bfloat16": 2e-2}[self.checkpoint]

    @property
    def output_tolerance(self) -> float:
        """Relative L2 error allowed in a head's outputs: they come from that state, or a copy of it, and are rounded."""
        copy = {"checkpoint": 0.0, "bf16": 2e-2, "bf16_plane": 2e-2, "fp8_e4m3": 0.2, "nvfp4": 0.6}[self.readout]
        return self.state_tolerance + copy + {"float32": 3e-6, "float16": 1e-3, "bfloat16": 6e-3}[self.activations]


def _family(delta_rule: bool, gate: str):
    return lambda id, heads, dims, **rest: Case(id=id, heads=heads, dims=dims, delta_rule=delta_rule, gate=gate, **rest)


_gdn, _kda, _ssd, _gla = _family(True, "head"), _family(True, "channel"), _family(False, "head"), _family(False, "channel")

CASES = (
    # Gated DeltaNet: ratios H/G of 1 to 4, OLMo-Hybrid's beta up to 2 and V = 2 K, and real head dims
    _gdn("gdn-ratio1", (2, 2), (16, 16), window=2, max_draft=1),  # a flush at every step: the plain recurrence's traffic
    _gdn("deltanet-ratio3", (6, 2), (8, 12), max_draft=8, decay="none", activations="float16"),
    _gdn("gdn-ratio4-bf16-checkpoint", (8, 2), (16, 8), window=32, max_draft=5, checkpoint="bfloat16"),
    _gdn("gdn-olmo", (3, 3), (48, 24), window=5, max_draft=2, beta_max=2.0),
    _gdn("gdn-olmo-192x96", (1, 1), (192, 96), max_draft=1, beta_max=2.0),
    _gdn("gdn-128", (2, 1), (128, 128), factors=True, activations="bfloat16"),
    # Kimi Delta Attention
    _kda("kda-ratio1", (3, 3), (16, 16), max_draft=1),
    _kda("kda-ratio2", (4, 2), (20, 8), window=5, max_draft=2),
    _kda("kda-128", (1, 1), (128, 128), factors=True, activations="bfloat16"),
    _kda("kda-fp16-checkpoint", (2, 2), (16, 16), max_draft=8, checkpoint="float16", activations="float16"),
    # Mamba-2: one group for all heads, several groups, Nemotron's P = 80, N = 96 and N = 256; and lightning attention
    _ssd("mamba2-g1", (16, 1), (4, 8), max_draft=1),
    _ssd("mamba2-g8", (16, 8), (5, 8), window=32, max_draft=5, beta_max=3.0),
    _ssd("mamba2-80x128", (2, 1), (80, 128), activations="bfloat16"),
    _ssd("mamba2-256", (1, 1), (256, 256), window=2, max_draft=1, activations="bfloat16"),
    _ssd("lightning-fp16-checkpoint", (4, 4), (10, 96), decay="constant", max_draft=8, checkpoint="float16"),
    # gated linear attention
    _gla("gla-64", (1, 1), (64, 64), activations="bfloat16"),
    _gla("gla-ratio2-bf16-checkpoint", (4, 2), (20, 8), window=5, max_draft=2, checkpoint="bfloat16", factors=True),
    # reads of the upper half of a checkpoint, kept apart from the lower
    _gdn("gdn-bf16-plane", (2, 1), (6, 24), window=5, max_draft=2, readout="bf16_plane"),
    # a read-out copy over raw records, and stochastic rounding below it
    _kda(
        "kda-nvfp4-readout-fp16-stochastic",
        (2, 1),
        (5, 24),
        window=7,
        max_draft=3,
        factors=True,
        readout="nvfp4",
        checkpoint="float16",
        rounding="stochastic",
    ),
)

# One small case for each recurrence, for tests of behaviour that no shape changes.
FAMILIES = (
    _gdn("gdn", (4, 2), (6, 8)),
    _kda("kda", (4, 2), (6, 8)),
    _ssd("mamba2", (4, 2), (6, 8)),
    _gla("gla", (4, 2), (6, 8)),
)


def case_named(name: str, **changes) -> Case:
    """The row called ``name``, with other fields if asked."""
    return dataclasses.replace(next(case for case in (*CASES, *FAMILIES) if case.id == name), **changes)


def make_tokens(case: Case, rng: np.random.Generator, rows: int, count: int) -> Tokens:
    """Random tokens as NumPy arrays. Unit keys, queries of norm about 1, gates from nearly open to nearly shut."""
    r, dtype = case.recurrence, jnp.dtype(case.activations)
    q, k = rng.standard_normal((2, rows, count, r.num_key_heads, r.key_dim))
    q_factor, k_factor = 1 / np.sqrt(r.key_dim) * np.ones(q.shape[:-1]), 1 / np.linalg.norm(k, axis=-1)
    if not case.factors:
        q, k = q * q_factor[..., None], k * k_factor[..., None]
    shape = (rows, count, *r.decay_dims)
    log_decay = {
        "mixed": lambda: -np.exp(rng.normal(-2.0, 1.5, shape)),
        "slow": lambda: -np.exp(rng.normal(-6.0, 1.0, shape)),
        "constant": lambda: np.broadcast_to(-np.linspace(0.02, 0.3, r.num_value_heads), shape),
        "none": lambda: np.zeros(shape),
    }[case.decay]()
    return Tokens(
        q=q.astype(dtype),
        k=k.astype(dtype),
        v=rng.standard_normal((rows, count, r.num_value_heads, r.value_dim)).astype(dtype),
        log_decay=log_decay.astype(np.float32),
        beta=rng.uniform(0, case.beta_max, (rows, count, r.num_value_heads)).astype(np.float32),
        q_scale=q_factor.astype(np.float32) if case.factors else None,
        k_scale=k_factor.astype(np.float32) if case.factors else None,
    )


def poison_dead(tokens: Tokens, live: np.ndarray) -> Tokens:
    """The tokens with NaN (and in the values, where there is room for both, inf) wherever ``live`` [B, T] is false."""

    def poison(x):
        if x is None:
            return None
        x = np.array(x)
        x[~live] = np.nan
        if x.ndim == 4:
            x[~live, ..., -1] = np.inf
        return x

    return Tokens(**{field.name: poison(getattr(tokens, field.name)) for field in dataclasses.fields(Tokens)})
