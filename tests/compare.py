"""Comparisons that the tests share: bits, and errors relative to what was expected."""

import jax
import numpy as np


def same_bits(left, right) -> bool:
    """Whether two pytrees of arrays are equal bit for bit, NaN included."""
    pairs = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def relative_error(got, want) -> float:
    """Relative L2 error; where nothing is expected, the norm itself. NaN counts as infinite."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape} instead of {want.shape}"
    size = np.linalg.norm(want)
    error = np.linalg.norm(got - want) / (size if size > 0 else 1.0)
    return float(error) if np.isfinite(error) else np.inf


def assert_heads_close(got, want, tolerance: float, what: str, scale: float) -> None:
    """Every head [H, ...] within ``tolerance`` of its own norm, or of ``scale``: no head hides behind a larger one.

    A head that should be NaN throughout, because it goes on from somebody's leftovers, must be.
    """
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    for h, (a, b) in enumerate(zip(got.astype(np.float64), want, strict=True)):
        if np.isnan(b).all():
            assert np.isnan(a).all(), f"{what}: head {h} made something of NaN"
            continue
        error, allowed = np.linalg.norm(a - b), tolerance * max(np.linalg.norm(b), scale)
        assert error <= allowed, f"{what}: head {h} is off by {error:.3g}, allowed {allowed:.3g}"
