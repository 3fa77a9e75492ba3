"""Each published kernel against the recurrence in float32, so that a timed call is known to be a right call.

The inputs are bfloat16 on both sides, the published kernels round outputs and records to bfloat16 and multiply in TF32 or
bfloat16: relative errors of some 1e-3, and 1e-2 late in a window, are expected; a wrong argument gives errors of order one.
"""

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peers_delta import DeltaLayer
from benchmarks.peers_mamba2 import Mamba2Layer
from benchmarks.peers_timing import WINDOW

ROWS = 8
SOUND = 5e-2  # relative error below which a call is taken to be right


def relative_error(got: Any, expected: Any) -> float:
    """||got - expected|| / ||expected|| in float32; NaN stays NaN."""
    got, expected = got.float().flatten(), expected.float().flatten()
    return float((got - expected).norm() / expected.norm())


def law(state: Any, q: Any, k: Any, v: Any, decay: Any, beta: Any = None) -> tuple[Any, Any]:
    """One token: S' = S decay + u k^T, o = S' q; u = v, or beta (v - S decay k) with a beta.

    Args:
        state: [B, H, V, K]. q, k: [B, H, K]. v: [B, H, V]. decay: [B, H, 1 or K], in (0, 1]. beta: [B, H] or None.

    Returns:
        S' [B, H, V, K] and o [B, H, V].
    """
    state = state * decay[:, :, None, :]
    update = v if beta is None else beta[..., None] * (v - (state @ k[..., None])[..., 0])
    state = state + update[..., None] * k[:, :, None, :]
    return state, (state @ q[..., None])[..., 0]


def delta_law(layer: DeltaLayer, state: Any, token: Any) -> tuple[Any, Any]:
    """All tokens of a row through the law. Returns the state and the outputs [B, T, HV, V]."""
    torch, repeat = layer.torch, layer.hv // layer.h
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).repeat_interleave(repeat, dim=2) for x in (token.q, token.k))
    decay = token.log_decay.exp()
    decay = decay if layer.gate else decay[..., None]
    outs = []
    for t in range(q.shape[1]):
        state, out = law(state, q[:, t] * layer.scale, k[:, t], token.v[:, t].float(), decay[:, t], token.beta[:, t])
        outs.append(out)
    return state, torch.stack(outs, dim=1)


def mamba2_law(layer: Mamba2Layer, state: Any, token: Any) -> tuple[Any, Any]:
    """All tokens of a row through the law. Returns the state and the outputs [B T, H, P]."""
    torch, repeat = layer.torch, layer.h // layer.g
    dt = torch.nn.functional.softplus(token.dt_raw.float() + layer.dt_bias[:, 0])
    x = token.x.float()
    rows = {"q": token.c.float().repeat_interleave(repeat, dim=1), "k": token.b.float().repeat_interleave(repeat, dim=1)}
    rows |= {"v": x * dt[..., None], "decay": (dt * layer.a[:, 0, 0]).exp()[..., None]}
    rows = {name: value.unflatten(0, (layer.batch, token.count)) for name, value in rows.items()}
    outs = []
    for t in range(token.count):
        state, out = law(state, **{name: value[:, t] for name, value in rows.items()})
        outs.append(out)
    return state, torch.stack(outs, dim=1).flatten(0, 1) + layer.d * x


Errors = Iterator[tuple[str, float]]


def _states(layer: Any, column: Any = None) -> Any:
    return layer.state[(layer.slots if column is None else column).long()].clone()


def check_steps(layer: Any, expect: Callable, replay: Callable) -> Errors:
    """A recurrent step; then a window of replay steps, its flush and one step more."""
    state, token = _states(layer), layer.tokens()
    out = layer.recurrent(token)
    state, expected = expect(layer, state, token)
    yield "recurrent output", relative_error(out, expected)
    yield "recurrent state", relative_error(_states(layer), state)
    worst = 0.0
    for records in [*range(WINDOW), 0]:
        token = layer.tokens()
        out = replay(token, records)
        if records == WINDOW - 1:
            flushed = _states(layer)
        state, expected = expect(layer, state, token)
        if records == WINDOW - 1:
            yield "replay state after the flush", relative_error(flushed, state)
        error = relative_error(out, expected)
        worst = error if not error <= worst else worst
    yield "replay output, worst of a window", worst


def check_snapshots(layer: Any, expect: Callable, snapshots: Callable, count: int) -> Errors:
    """T tokens with a state written after each; the first and the last state are compared."""
    token, table = layer.tokens(count), layer.table(count)
    start = _states(layer, table[:, 0])
    out = snapshots(token, table, layer.full(1))
    state, expected = expect(layer, start, token)
    yield f"snapshots output, {count} tokens", relative_error(out, expected)
    yield f"snapshots last state, {count} tokens", relative_error(_states(layer, table[:, -1]), state)


def check_delta_verify(layer: DeltaLayer, count: int) -> Errors:
    """Two drafts of T tokens, all kept; then each of the two folds."""
    pool, raw = layer.state.shape[0], layer.raw()
    start, first, second = _states(layer), layer.tokens(count), layer.tokens(count)
    middle, _ = delta_law(layer, start, first)
    end, expected = delta_law(layer, middle, second)
    layer.verify(first, layer.full(0, pool), layer.unflagged, raw=raw)
    out = layer.verify(second, layer.full(count, pool), layer.unflagged)
    yield f"verify output, {count} tokens", relative_error(out, expected)
    layer.fold(layer.full(2 * count, pool), layer.flagged)
    yield f"verify state after the compact fold, {count} tokens", relative_error(_states(layer), end)
    layer.state[layer.slots.long()] = start
    out = layer.verify(second, layer.full(count, pool), layer.flagged, "flush", raw)
    yield f"verify output after the exact fold, {count} tokens", relative_error(out, expected)
    yield f"verify state after the exact fold, {count} tokens", relative_error(_states(layer), middle)


def check_mamba2_verify(layer: Mamba2Layer, count: int) -> Errors:
    """Two drafts of T tokens, all kept; the second once without and once with the fold of the first."""
    start, first, second = _states(layer), layer.tokens(count), layer.tokens(count)
    ring, kept = layer.verify_rings(first), layer.full(count, layer.pool)
    off, on = (layer.full(flag, layer.pool, layer.torch.int8) for flag in (0, 1))
    middle, _ = mamba2_law(layer, start, first)
    _, expected = mamba2_law(layer, middle, second)
    layer.verify(first, ring, layer.full(0, layer.pool), off)
    yield f"verify output, {count} tokens", relative_error(layer.verify(second, ring, kept, off), expected)
    yield f"verify output with the fold, {count} tokens", relative_error(layer.verify(second, ring, kept, on), expected)
    yield f"verify state after the fold, {count} tokens", relative_error(_states(layer), middle)


def _checks(family: str, heads: tuple[int, int], dims: tuple[int, int], part: str, tokens: tuple[int, ...]) -> Iterator[Errors]:
    if family == "mamba2":
        layer = Mamba2Layer(heads, dims, ROWS, slots=ROWS * max(tokens))
        if part == "step":
            ring = layer.records()
            on, off = (layer.full(flag, dtype=layer.torch.int8) for flag in (1, 0))
            yield check_steps(
                layer, mamba2_law, lambda token, r: layer.replay(token, ring, layer.full(r), on if r == WINDOW - 1 else off)
            )
        elif part == "snapshots":
            yield from (check_snapshots(layer, mamba2_law, layer.recurrent, count) for count in tokens)
        else:
            for count in tokens:
                yield check_mamba2_verify(Mamba2Layer(heads, dims, ROWS, 16 if 2 * count <= 16 else 32), count)
    elif part == "step":
        delta = DeltaLayer(family, heads, dims, ROWS)
        yield check_steps(delta, delta_law, lambda token, records: delta.replay(token, delta.full(records)))
    elif family == "gdn" and part == "snapshots":
        delta = DeltaLayer(family, heads, dims, ROWS, slots=ROWS * max(tokens))
        yield from (check_snapshots(delta, delta_law, delta.snapshots, count) for count in tokens)
    elif family == "gdn":
        for count in tokens:
            yield check_delta_verify(DeltaLayer(family, heads, dims, ROWS, 16 if 2 * count <= 16 else 32), count)


def run_checks(family: str, heads: tuple[int, int], dims: tuple[int, int], part: str, tokens: tuple[int, ...]) -> list[dict]:
    """All checks of a family's part. One that raises is recorded with its error and stops no other."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = False
    results = []
    for errors in _checks(family, heads, dims, part, tokens):
        entry: dict[str, Any] = {"family": family, "heads": list(heads), "part": part}
        try:
            for name, error in errors:
                results.append(entry | {"check": name, "relative_error": error, "sound": error < SOUND})
        except Exception as failure:  # a peer's kernel may raise anything
            results.append(entry | {"error": f"{type(failure).__name__}: {failure}"[:400], "sound": False})
    return results
