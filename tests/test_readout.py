"""Read-out formats, bit for bit: decoded and encoded again by plain NumPy that shares nothing with the library."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import replayssm_jax as rs
from replayssm_jax import readout
from replayssm_jax.readout import FORMATS, PLANE
from tests.compare import same_bits
from tests.lockstep import FAST_COMPILE

encode = jax.jit(readout.encode, static_argnums=0, compiler_options=FAST_COMPILE)
decode = jax.jit(readout.decode, static_argnums=(0, 2), compiler_options=FAST_COMPILE)
every_format = pytest.mark.parametrize("form", FORMATS)
every_copy = pytest.mark.parametrize("form", [form for form in FORMATS if form != PLANE])

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def small_float_values(mantissa: int, bias: int, count: int) -> np.ndarray:
    """Values of the patterns 0 .. count - 1 of a binary format, by the definition of one."""
    pattern = np.arange(count)
    exponent, fraction = pattern >> mantissa, (pattern & (2**mantissa - 1)) / 2.0**mantissa
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


E4M3 = small_float_values(3, 7, 127)  # up to 448; the pattern after that is NaN
BF16 = small_float_values(7, 127, 0x7F80)


def nearest(magnitude: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Index of the nearest of ascending values, the even one of two that are as near, the last one for what is beyond."""
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    low, high = magnitude - values[above - 1], values[above] - magnitude
    return np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1)


def away_from_zero(x: np.ndarray) -> np.ndarray:
    """Patterns of the nearest bfloat16, the larger of two that are as near, infinity for what is beyond."""
    values, magnitude = np.append(BF16, 2.0**128), np.abs(x)
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    up = values[above] - magnitude <= magnitude - values[above - 1]
    return np.where(up, above, above - 1) | np.where(np.signbit(x), 0x8000, 0)


def least_power(magnitude: float, largest: float) -> float:
    """The least 2^e, e >= -110, with magnitude <= largest * 2^e; 0 for next to nothing."""
    if magnitude < 2.0**-126:
        return 0.0
    return next(2.0**e for e in range(-110, 128) if magnitude <= largest * 2.0**e)


def signed_code(x: np.ndarray, values: np.ndarray, sign_bit: int) -> np.ndarray:
    return nearest(np.abs(x), values) | np.where(np.signbit(x), sign_bit, 0)


def numpy_encode(form: str, x: np.ndarray) -> dict[str, np.ndarray]:
    """The docstring of ``readout``, in float64 and with loops: patterns and scales of a checkpoint [N, H, V, K]."""
    real = np.isfinite(x)
    x = np.where(real, x.astype(np.float64), 0)
    if form == "bf16":
        return {"payload": np.where(real, signed_code(x, BF16, 0x8000), 0x7FC0)}
    if form == "bf16_plane":
        return {"payload": np.where(real, away_from_zero(x), 0x7FC0)}
    x = np.clip(x, -(2.0**127), 2.0**127)
    if form == "fp8_e4m3":
        scale = np.vectorize(lambda largest: least_power(largest, 448))(np.abs(x).max(-1))
        scaled = np.where(scale[..., None] > 0, x / np.where(scale > 0, scale, 1)[..., None], np.copysign(0, x))
        return {"payload": np.where(real, signed_code(scaled, E4M3, 0x80), 0x7F), "scale": scale}
    slots, heads, rows, keys = x.shape
    blocks = -(-keys // 16)
    x = np.pad(x, [(0, 0)] * 3 + [(0, 16 * blocks - keys)]).reshape(slots, heads, rows, blocks, 16)
    real = np.pad(real, [(0, 0)] * 3 + [(0, 16 * blocks - keys)], constant_values=True).reshape(x.shape)
    scale, block_scale = np.zeros((slots, heads)), np.zeros(x.shape[:4], int)
    payload = np.zeros((slots, heads, rows, 8 * blocks), np.uint8)
    for n, h in np.ndindex(slots, heads):
        scale[n, h] = least_power(np.abs(x[n, h]).max(), 6 * 448)
        for v, b in np.ndindex(rows, blocks):
            block = x[n, h, v, b]
            largest = np.abs(block).max() / (scale[n, h] or 1) * (scale[n, h] > 0)
            block_scale[n, h, v, b] = nearest(np.float32(largest) * np.float32(1 / 6), E4M3)
            unit = E4M3[block_scale[n, h, v, b]] * scale[n, h]
            if not real[n, h, v, b].all():
                block_scale[n, h, v, b] = 0x7F
            elif unit > 0:
                code = signed_code(block / unit, E2M1, 8)
                payload[n, h, v, 8 * b : 8 * b + 8] = code[::2] | code[1::2] << 4
    return {"payload": payload, "scale": scale, "block_scale": block_scale}


def numpy_decode(form: str, copy: rs.Readout, keys: int) -> np.ndarray:
    """What a user writes who has the arrays and no library: float64 values."""

    def values(patterns: np.ndarray, table: np.ndarray, bits: int) -> np.ndarray:
        table = np.append(table, np.nan)  # the pattern after the largest
        return np.where(patterns >> (bits - 1), -1, 1) * table[np.minimum(patterns & (2 ** (bits - 1) - 1), len(table) - 1)]

    payload = np.asarray(copy.payload)
    if form in ("bf16", "bf16_plane"):
        return values(payload, BF16, 16)
    if form == "fp8_e4m3":
        return values(payload, E4M3, 8) * np.asarray(copy.scale, np.float64)[..., None]
    nibbles = np.zeros((*payload.shape[:-1], 2 * payload.shape[-1]), np.uint8)
    nibbles[..., 0::2], nibbles[..., 1::2] = payload % 16, payload // 16
    scale = values(np.asarray(copy.block_scale), E4M3, 8) * np.asarray(copy.scale, np.float64)[..., None, None]
    return (values(nibbles, E2M1, 4) * np.repeat(scale, 16, axis=-1))[..., :keys]


def arrays(copy: rs.Readout) -> dict[str, np.ndarray]:
    """Arrays of a read-out that are there."""
    return {path[-1].name: np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(copy)}


def state_like(rng: np.random.Generator, keys: int = 48) -> np.ndarray:
    """A checkpoint of heads and rows of very different sizes, with zeros, ties and negative zeros among its values."""
    x = (
        rng.standard_normal((2, 3, 4, keys))
        * np.exp(rng.normal(0, 3, (2, 3, 4, 1)))
        * 10.0 ** rng.integers(-6, 6, (2, 3, 1, 1))
    )
    x[0, 0, 0] = 0.0
    x[0, 1] = 0.0
    x[1, 0, 1, ::3] = -0.0
    x[1, 1, 2] = rng.integers(-24, 25, keys) / 4  # halves and quarters of e2m1's steps
    x[1, 1, 3, :16] *= 2.0**-30  # a block far below its head's scale
    return x.astype(np.float32)


@every_format
@pytest.mark.parametrize("keys", [48, 24, 1])
def test_numpy_encodes_to_the_same_bits_and_decodes_to_the_same_values(form, keys, rng):
    """Key dims that are no multiple of 16 are padded with zeros."""
    x = state_like(rng, keys)
    copy = encode(form, x)
    want = numpy_encode(form, x)
    got = arrays(copy)
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name].astype(got[name].dtype), err_msg=name)
    values = numpy_decode(form, copy, keys)
    np.testing.assert_array_equal(np.asarray(decode(form, copy, keys), np.float64), values)


@every_format
def test_errors_are_those_of_the_format(form, rng):
    """Half a step of a value's own size; for e2m1 a sixth of its block's largest value, which is half the step at the top.

    To that comes what is too small for a row's or head's scale.
    """
    x = state_like(rng)
    error = np.abs(np.asarray(decode(form, encode(form, x), 48)) - x)
    largest = np.abs(x).reshape(*x.shape[:3], 3, 16).max(-1).repeat(16, axis=-1)
    allowed = {
        "bf16": np.abs(x) * 2.0**-8,
        "bf16_plane": np.abs(x) * 2.0**-8,
        "fp8_e4m3": np.abs(x) * 2.0**-4 + np.abs(x).max(-1, keepdims=True) * 2.0**-17,
        "nvfp4": largest / 5.5 + np.abs(x).max((-2, -1), keepdims=True) * 2.0**-17,
    }
    assert (error <= allowed[form]).all()


def test_nibbles_lie_low_first_and_blocks_along_the_key_dimension():
    x = np.zeros((1, 1, 1, 32), np.float32)
    x[0, 0, 0, :4] = [6, -0.5, 1, 3]
    x[0, 0, 0, 16:18] = [-12, 1]
    copy = encode("nvfp4", x)
    assert float(copy.scale[0, 0]) == 2.0**-7  # the least power of two that 12 fits under 2688 times
    np.testing.assert_array_equal(E4M3[copy.block_scale[0, 0, 0]], [128, 256])
    payload = np.asarray(copy.payload[0, 0, 0])
    assert [hex(byte) for byte in payload[:2]] == ["0x97", "0x52"]
    assert [hex(byte) for byte in payload[8:9]] == ["0x1f"]


def test_e2m1_ties_go_to_the_even_code():
    halfway = np.array([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0, 0, 0, 0, 0, 0, 0, 0], np.float32)
    for sign in (1, -1):
        values = np.asarray(decode("nvfp4", encode("nvfp4", sign * halfway.reshape(1, 1, 1, 16)), 16)).ravel()
        np.testing.assert_array_equal(sign * values[:8], [6, 0, 1, 1, 2, 2, 4, 4])
    above = np.nextafter(halfway, np.float32(9))
    values = np.asarray(decode("nvfp4", encode("nvfp4", np.where(halfway == 6, 6, above).reshape(1, 1, 1, 16)), 16)).ravel()
    np.testing.assert_array_equal(values[:8], [6, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_patterns_are_those_of_the_dtypes_in_ml_dtypes():
    x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(1, 1, 2, 32)
    eighths, halves = encode("fp8_e4m3", x), encode("bf16", x)
    np.testing.assert_array_equal(np.asarray(halves.payload).view(ml_dtypes.bfloat16), x.astype(ml_dtypes.bfloat16))
    scaled = x / np.asarray(eighths.scale)[..., None]
    np.testing.assert_array_equal(
        np.asarray(eighths.payload).view(ml_dtypes.float8_e4m3fn), scaled.astype(ml_dtypes.float8_e4m3fn)
    )


@every_format
def test_every_value_of_a_format_is_kept(form):
    """What a format can say it says: all patterns of e4m3 and e2m1 at several scales, and of bfloat16, normal ones."""
    halves = BF16[BF16 >= 2.0**-126]
    sizes = {"bf16": halves, "bf16_plane": halves, "fp8_e4m3": E4M3, "nvfp4": np.pad(E2M1, (0, 8))}[form]
    for scale in (1.0,) if form in ("bf16", PLANE) else (2.0**-100, 2.0**-3, 1.0, 2.0**60):
        x = (np.stack([sizes, -sizes]) * scale).astype(np.float32)[None, None]
        np.testing.assert_array_equal(np.asarray(decode(form, encode(form, x), x.shape[-1])), x)


@every_copy
@pytest.mark.parametrize("checkpoint", ["float32", "float16", "bfloat16"])
def test_the_ends_of_the_range(form, checkpoint):
    """The largest and the smallest numbers of a checkpoint neither overflow a copy nor become NaN in it."""
    info = jnp.finfo(checkpoint)
    ends = np.array([float(info.max), -float(info.max), float(info.tiny), float(info.smallest_subnormal), 0.0, -0.0])
    for value in ends:
        x = jnp.full((1, 1, 2, 16), value, checkpoint)
        read = np.asarray(decode(form, encode(form, x), 16))
        assert np.isfinite(read).all()
        if abs(value) >= 2.0**-100:
            assert np.abs(read / value - 1).max() < 0.51  # 2^127 is half of the largest float32


@every_copy
def test_what_is_not_finite_reads_as_nan_and_enters_no_scale(form, rng):
    x = np.abs(rng.standard_normal((1, 2, 2, 48)).astype(np.float32)) + 0.1
    dirty = x.copy()
    dirty[0, 0, 0, 1], dirty[0, 0, 1, 20], dirty[0, 0, 1, 33] = np.nan, np.inf, -np.inf
    lost = np.zeros(x.shape, bool)
    lost[0, 0, 0, 1], lost[0, 0, 1, 20], lost[0, 0, 1, 33] = True, True, True
    if form == "nvfp4":  # with the blocks around them
        lost[0, 0, 0, :16], lost[0, 0, 1, 16:] = True, True
    got, zeroed = (np.asarray(decode(form, encode(form, y), 48)) for y in (dirty, np.where(np.isfinite(dirty), dirty, 0)))
    np.testing.assert_array_equal(np.isnan(got), lost)
    np.testing.assert_array_equal(got[~lost], zeroed[~lost])
    np.testing.assert_array_equal(got[0, 1], np.asarray(decode(form, encode(form, x), 48))[0, 1])


@every_format
def test_zeros_encode_to_zero_bytes_and_slots_do_not_see_each_other(form, rng):
    """A reset writes zeros without encoding anything, and a pool is a stack of slots."""
    x = state_like(rng)
    assert not any(x.any() for x in arrays(encode(form, np.zeros_like(x))).values())
    whole, alone = encode(form, x), encode(form, x[1:])
    assert same_bits(jax.tree.map(lambda pool: pool[1:], whole), alone)
    by_slot = jax.jit(jax.vmap(lambda x: readout.encode(form, x)), compiler_options=FAST_COMPILE)
    assert same_bits(whole, by_slot(x))


def test_two_planes_are_the_checkpoint_bit_for_bit(rng):
    """Ordinary numbers, all bits at random, the ends of the range, what is not finite."""
    bits = rng.integers(0, 2**32, (1, 1, 64, 64), np.uint32)
    ends = np.float32([0.0, -0.0, 1e-45, -1e-45, 2.0**-126, 3.4028235e38, -3.4028235e38, np.inf, -np.inf])
    for x in (state_like(rng), bits.view(np.float32), ends.reshape(1, 1, 1, -1)):
        upper, lower = encode(PLANE, x), readout.lower_plane(jnp.asarray(x))
        assert upper.payload.nbytes + lower.nbytes == x.nbytes
        joined = np.asarray(readout.join_planes(upper.payload, lower))
        np.testing.assert_array_equal(np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32), joined.view(np.uint32))
        read = np.asarray(decode(PLANE, upper, x.shape[-1]))
        assert (np.isnan(read) == np.isnan(x)).all()
    largest = np.float32([3.4028235e38, np.inf]).reshape(1, 1, 1, 2)
    assert np.isinf(decode(PLANE, encode(PLANE, largest), 2)).all()


def test_a_format_without_a_name_is_refused():
    with pytest.raises(ValueError, match="form must be one of bf16, bf16_plane, fp8_e4m3, nvfp4, got 'int8'"):
        readout.encode("int8", jnp.zeros((1, 1, 1, 16)))
    with pytest.raises(ValueError, match="got 'fp8'"):
        readout.decode("fp8", encode("bf16", jnp.zeros((1, 1, 1, 16))), 16)
