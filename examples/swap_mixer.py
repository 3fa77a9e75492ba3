"""A Flax hybrid block of your own, before and after its recurrent mixer is replaced by ours in one line.

    python examples/swap_mixer.py

``Hybrid`` below stands for a model that you already have; its mixer computes the plain Gated DeltaNet recurrence, one token at
a time. The same block around ``GatedDeltaNet`` decodes through the replay path, from the same weights.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from replayssm_jax import after_prefill, after_verify, commit, init_pointer
from replayssm_jax.mixers import GatedDeltaNet, GatedDeltaNetConfig

CONFIG = GatedDeltaNetConfig(hidden_size=64, num_key_heads=2, num_value_heads=4, key_head_dim=16, value_head_dim=16)


class PlainDeltaNet(GatedDeltaNet):
    """What stood there before: the same weights through the plain recurrence, token by token."""

    def __call__(self, cache, x, pointer, *, prefill=False):
        return super().__call__(cache, x, pointer, prefill=prefill, implementation="reference")


class Hybrid(nnx.Module):
    """x + mixer(x), then x + mlp(x): your block. Only the class of ``mixer`` changes."""

    def __init__(self, mixer, rngs):
        self.mixer = mixer(CONFIG, rngs=rngs)  # <- the line: PlainDeltaNet before, GatedDeltaNet after
        self.norm = nnx.RMSNorm(64, rngs=rngs)
        self.mlp = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, cache, x, pointer, prefill=False):
        cache, y = self.mixer(cache, self.norm(x), pointer, prefill=prefill)
        return cache, x + y + jax.nn.silu(self.mlp(x + y))


def decode(block: Hybrid, prompt: jax.Array, steps: int) -> jax.Array:
    """Feeds the block's output back to it, ``steps`` times. [B, T, 64] -> [B, steps, 64]"""
    cache, pointer = block.mixer.init_cache(len(prompt)), init_pointer(len(prompt), window=16, max_draft=1)
    cache, y = block(cache, prompt, pointer, prefill=True)
    pointer = after_prefill(pointer, None, jnp.full(len(prompt), prompt.shape[1]))

    def step(carry, _):
        cache, pointer, x = carry
        cache, y = block(cache, x, pointer)
        return (cache, commit(after_verify(pointer), 1), y), y[:, 0]

    _, ys = jax.lax.scan(step, (cache, pointer, y[:, -1:]), length=steps)
    return jnp.swapaxes(ys, 0, 1)


def main() -> None:
    prompt = jax.random.normal(jax.random.key(0), (2, 10, 64))
    before = decode(Hybrid(PlainDeltaNet, nnx.Rngs(0)), prompt, 40)
    after = decode(Hybrid(GatedDeltaNet, nnx.Rngs(0)), prompt, 40)
    error = float(jnp.linalg.norm(after - before) / jnp.linalg.norm(before))
    print(f"40 steps of 2 sequences; relative difference before and after: {error:.1e}")
    if not error < 1e-5:
        raise SystemExit("swap_mixer.py: the outputs differ")


if __name__ == "__main__":
    main()
