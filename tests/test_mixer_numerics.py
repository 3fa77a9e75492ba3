"""What a mixer computes: gates, write strengths, norms and clips against their formulas, whatever the activations' dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from replayssm_jax import ReplayPolicy, init_pointer
from replayssm_jax.mixers.kimi_delta import log_gate
from tests.golden_data import assign
from tests.mixer_oracle import GATES, HIDDEN, MIXERS, gated_delta_net, kimi_delta, law, mamba2, oracle, sigmoid, softplus
from tests.mixer_runs import Run, products, relative

TOLERANCE = 1e-5
WINDOW = 8  # a flush every seventh step
TOKENS = 16

every_mixer = pytest.mark.parametrize("name", MIXERS)
every_gate = pytest.mark.parametrize("name", GATES)
delta_mixers = pytest.mark.parametrize("name", ["gated_delta_net", "kimi_delta"])


def draw(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((2, TOKENS, HIDDEN)).astype(np.float32)


def fresh(mixer: Any) -> Run:
    return Run.fresh(mixer, 2, ReplayPolicy(window=WINDOW, record_dtype=mixer.dtype))


def check_both_ways(mixer: Any, x: np.ndarray) -> None:
    """A prompt, and the same tokens one by one, do what the float64 oracle does, in output and state."""
    traces = [oracle(mixer, row) for row in x]
    for way in (Run.prompt, Run.steps):
        run = fresh(mixer)
        y, states = way(run, x), run.state()
        for row, trace in enumerate(traces):
            assert relative(y[row], trace.y, 2) <= TOLERANCE
            assert relative(states[row], trace.states[-1], 2) <= TOLERANCE


def parameters(mixer: Any) -> dict[str, Any]:
    return {".".join(map(str, path)): v.get_value() for path, v in nnx.to_flat_state(nnx.state(mixer, nnx.Param))}


def put(mixer: Any, values: dict[str, Any]) -> Any:
    """The mixer with some parameters set, each to a value of its shape or one for all its elements."""
    old = parameters(mixer)
    assign(mixer, old | {path: np.broadcast_to(value, old[path].shape) for path, value in values.items()})
    return mixer


def selector(features: int, outputs: int) -> np.ndarray:
    """A projection that picks input features, and so is exact in any dtype. [features, outputs]"""
    return np.eye(features, dtype=np.float32)[:, np.arange(outputs) % features]


def mamba2_dt_only(mixer: Any, dt: np.ndarray) -> np.ndarray:
    """An in_proj whose dt columns are ``dt`` [hidden, H] and whose others are as they were."""
    kernel = np.array(parameters(mixer)["in_proj.kernel"], np.float32)
    kernel[:, -mixer.config.num_heads :] = dt
    return kernel


@pytest.mark.parametrize(
    "mixer",
    [
        lambda: gated_delta_net(allow_negative_eigenvalues=True, norm_eps=0.1),
        lambda: gated_delta_net(num_key_heads=1, num_value_heads=3, conv_width=2),
        lambda: kimi_delta(gate_lower_bound=-0.5, norm_eps=0.1, conv_width=3),
        lambda: mamba2(time_step_limit=(0.25, 0.5)),
        lambda: mamba2(proj_bias=True, conv_bias=False, norm_groups=1, num_groups=1, norm_eps=0.1),
    ],
    ids=["gdn-negative-eigenvalues", "gdn-one-key-head-conv-2", "kda-half-bound-conv-3", "mamba2-clipped", "mamba2-proj-bias"],
)
def test_every_option_of_a_config(mixer, rng):
    """Prompts and steps alike: a clip of dt in the prompt alone, say, would part them."""
    check_both_ways(mixer(), draw(rng))


def test_time_step_limit_clips_both_sides(rng):
    """dt itself, where softplus gives less than the lower and more than the upper limit."""
    mixer, x = mamba2(time_step_limit=(0.25, 0.5)), draw(rng)
    free = softplus(x @ parameters(mixer)["in_proj.kernel"][:, -4:] + parameters(mixer)["dt_bias"])
    assert (free < 0.25).any()
    assert (free > 0.5).any()
    tokens = fresh(mixer).tokens(x)
    np.testing.assert_allclose(tokens.beta, np.clip(free, 0.25, 0.5), rtol=1e-5)
    np.testing.assert_allclose(tokens.log_decay, -np.exp(parameters(mixer)["A_log"]) * tokens.beta, rtol=1e-5)


@delta_mixers
@pytest.mark.parametrize("count", [1, TOKENS])
def test_beta_is_the_float32_sigmoid_of_a_bfloat16_projection(name, count, rng):
    """Rounded to bfloat16, beta would drift with the context; a step (T = 1) and a prompt agree.

    Row 52, https://github.com/sgl-project/sglang/issues/38975
    """
    mixer, heads = MIXERS[name](dtype=jnp.bfloat16), 3 if "kimi" in name else 4
    projection = "b_proj.kernel" if "kimi" in name else "in_proj_b.kernel"
    put(mixer, {projection: selector(HIDDEN, heads)})
    x = jnp.asarray(draw(rng)[:, :count], jnp.bfloat16)
    beta = np.asarray(fresh(mixer).tokens(x).beta)
    want = sigmoid(np.asarray(x, np.float64)[..., :heads])
    np.testing.assert_allclose(beta, want, rtol=1e-6, atol=0)
    assert (beta != np.asarray(jnp.asarray(beta, jnp.bfloat16), np.float32)).any(), "these would survive bfloat16"


@every_gate
def test_a_log_and_dt_bias_keep_float32_under_bfloat16_activations(name, rng):
    """Neither weights nor activations in bfloat16 cost the gate's parameters a bit.

    Row 70, https://github.com/NVIDIA/Megatron-LM/pull/3634
    """
    mixer = GATES[name](dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    zero = {"in_proj_a.kernel": 0} if "gated" in name else {"f_b_proj.kernel": 0}
    if name == "mamba2":
        zero = {"in_proj.kernel": mamba2_dt_only(mixer, np.zeros((HIDDEN, 4)))}
    a_log, dt_bias = 0.5 + 2.0**-12, -1 + 2.0**-14  # neither is a bfloat16
    put(mixer, {"A_log": a_log, "dt_bias": dt_bias, **zero})
    decay = -np.exp(a_log) * softplus(np.float64(dt_bias))
    if name == "kimi_delta_bounded":
        decay = -5 * sigmoid(np.exp(a_log) * dt_bias)
    tokens = fresh(mixer).tokens(jnp.asarray(draw(rng), jnp.bfloat16))
    np.testing.assert_allclose(tokens.log_decay, np.full(tokens.log_decay.shape, decay), rtol=1e-6)
    assert tokens.log_decay.dtype == tokens.beta.dtype == jnp.float32
    assert tokens.k.dtype == tokens.v.dtype == jnp.bfloat16, "these stay as they come, so that they are recorded as they come"


@every_mixer
def test_bfloat16_activations_leave_a_float32_state(name, rng):
    """The state is the float64 recurrence on the mixer's own bfloat16 inputs: nothing is rounded on the way.

    Row 54, https://github.com/flashinfer-ai/flashinfer/pull/4140
    """
    mixer = MIXERS[name](dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    x = jnp.asarray(draw(rng), jnp.bfloat16)
    tokens = jax.tree.map(lambda a: np.asarray(a, np.float64), fresh(mixer).tokens(x))
    q, k = tokens.q, tokens.k
    if tokens.q_scale is not None:
        q, k = q * tokens.q_scale[..., None], k * tokens.k_scale[..., None]
    for way in (Run.prompt, Run.steps):
        run = fresh(mixer)
        assert way(run, x).dtype == jnp.bfloat16
        for row, state in enumerate(run.state()):
            arguments = q[row], k[row], tokens.v[row], tokens.log_decay[row], tokens.beta[row]
            assert relative(state, law(mixer.config.recurrence, *arguments)[1][-1], 2) <= TOLERANCE


@pytest.mark.parametrize("f", [10.0, -10.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_formulas_at_their_ends(f, lower_bound):
    """lower_bound * sigmoid(exp(A_log) * f), no clamped softplus; and the unbounded gate beside it.

    Row 56, https://github.com/lightseekorg/tokenspeed/pull/847 (an A_log of None has no counterpart here)
    """
    want = -np.exp(1.0) * softplus(f) if lower_bound is None else lower_bound * sigmoid(np.exp(1.0) * f)
    got = log_gate(jnp.full((1, 1, 1, 2), f), jnp.ones(1), lower_bound)
    np.testing.assert_allclose(got, np.full((1, 1, 1, 2), want), rtol=2e-6)
    mixer = put(kimi_delta(gate_lower_bound=lower_bound), {"f_b_proj.kernel": 0, "dt_bias": f, "A_log": 1.0})
    log_decay = fresh(mixer).tokens(np.ones((2, 1, HIDDEN), np.float32)).log_decay
    np.testing.assert_allclose(log_decay, np.full(log_decay.shape, want), rtol=2e-6)


@every_gate
def test_softplus_of_a_hundred(name):
    """No overflow at 100 and no decay at -100, in prompts and in steps.

    Row 60, https://github.com/flashinfer-ai/flashinfer/pull/4481
    """
    mixer, x = GATES[name](), draw(np.random.default_rng(0))  # not any x: without memory, outputs are as good as one q . k
    bias = np.resize([100.0, -100.0], parameters(mixer)["dt_bias"].shape).astype(np.float32)
    put(mixer, {"dt_bias": bias, "A_log": 0.0})
    log_decay = np.asarray(fresh(mixer).tokens(x).log_decay)
    signs = bias.reshape(log_decay.shape[2:])
    assert np.isfinite(log_decay).all()
    assert (np.exp(log_decay[..., signs < 0]) == 1).all()
    assert (log_decay[..., signs > 0] < (-4.9 if name == "kimi_delta_bounded" else -90)).all()
    check_both_ways(mixer, x)


@delta_mixers
def test_keys_are_normalised(name, rng):
    """A long key gets length 1, a zero key stays zero and makes no NaN, a short one meets the 1e-6 inside the root.

    Row 63, https://github.com/flashinfer-ai/flashinfer/pull/5255
    """
    mixer, x = MIXERS[name](), draw(rng)
    weight = np.asarray(parameters(mixer)["conv1d.weight"])
    put(mixer, {"conv1d.weight": 100 * weight})
    tokens = fresh(mixer).tokens(x)
    assert np.median(np.linalg.norm(tokens.k, axis=-1)) > 50
    norms = np.linalg.norm(tokens.k * tokens.k_scale[..., None], axis=-1)
    np.testing.assert_allclose(norms[np.linalg.norm(tokens.k, axis=-1) > 50], 1, rtol=1e-5)
    check_both_ways(mixer, x)

    put(mixer, {"conv1d.weight": 1e-3 * weight})
    check_both_ways(mixer, x)

    x[:, 4:12] = 0  # longer than the convolution: these keys are zero
    put(mixer, {"conv1d.weight": weight})
    assert not np.asarray(fresh(mixer).tokens(x).k)[:, 7:12].any()
    check_both_ways(mixer, x)


@every_mixer
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("prefill", [True, False], ids=["prompt", "drafts"])
def test_no_float32_product_is_rounded(name, dtype, prefill):
    """Every product of float32 operands asks for full precision: no TF32, no single bfloat16 pass, on any device.

    Row 69, https://github.com/vllm-project/tpu-inference/pull/2408
    """
    mixer, policy = MIXERS[name](dtype=dtype, param_dtype=dtype), ReplayPolicy(max_draft=4, record_dtype=dtype)

    def call(cache, x, pointer):
        return mixer(cache, x, pointer, prefill=prefill)

    arguments = mixer.init_cache(2, policy), jnp.zeros((2, 4, HIDDEN), dtype), init_pointer(2, 16, 4)
    dots = products(jax.make_jaxpr(call)(*arguments).jaxpr)
    wide = [eqn for eqn in dots if any(operand.aval.dtype == jnp.float32 for operand in eqn.invars)]
    linears = sum(path.endswith("kernel") for path in parameters(mixer))
    assert len(dots) - len(wide) == (linears if dtype == jnp.bfloat16 else 0), "bfloat16 products are for projections"
    assert wide
    for eqn in wide:
        assert set(eqn.params["precision"]) == {jax.lax.Precision.HIGHEST}, eqn
        assert all(operand.aval.dtype == jnp.float32 for operand in eqn.invars), eqn
