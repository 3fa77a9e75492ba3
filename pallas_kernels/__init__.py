"""GPU kernels of ReplaySSM decoding: arrays in, arrays out. One folder per GPU generation; they import JAX and nothing else.

Beside them lies integer arithmetic that must be the same in kernels and in jnp: ``small_floats``, ``chance``.
"""
