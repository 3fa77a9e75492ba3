"""An engine on disk: every slot as it lies, mid-window or not, and every request that is not done. It goes on bit for bit.

A folder holds ``arrays.safetensors``, the slots and the memory of requests that have none, and ``engine.json``, the rest.
Weights are not in it: the model, drafter and tokenizer are given again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with NumPy, which safetensors needs
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from replayssm_jax.decoding.drafters import Drafter
from replayssm_jax.decoding.engine import Engine
from replayssm_jax.decoding.engine_config import EngineConfig
from replayssm_jax.decoding.requests import Request, State
from replayssm_jax.decoding.sampling import SamplingParams
from replayssm_jax.decoding.sequences import take
from replayssm_jax.decoding.text import Tokenizer
from replayssm_jax.models.decoder import Decoder
from replayssm_jax.state import ReplayPolicy

_ARRAYS, _REST, _FORMAT = "arrays.safetensors", "engine.json", 3


def save(engine: Engine, folder: str | pathlib.Path) -> None:
    """Writes an engine to a new folder, which appears when it is complete. The engine is left as it is.

    Raises:
        FileExistsError: the folder is there already; nothing is overwritten.
    """
    folder = pathlib.Path(folder)
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: save to a new folder")
    requests = engine.requests
    arrays = _named("slots", engine.pool.sequences)
    for request in requests:
        if request.memory is not None:
            arrays |= _named(f"memory{request.number}", request.memory)
    for i, memory in enumerate(engine.prefixes.memories):
        arrays |= _named(f"prefix{i}", memory)
    rest = {
        "format": _FORMAT,
        "config": dataclasses.asdict(engine.config),
        "made_for": _made_for(engine),
        "next_number": engine.next_number,
        "requests": [_describe(engine, request) for request in requests],
        "prefixes": [list(prefix) for prefix in engine.prefixes],
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
        unfinished = pathlib.Path(temporary) / "engine"
        unfinished.mkdir()
        save_file(arrays, unfinished / _ARRAYS)
        (unfinished / _REST).write_text(json.dumps(rest))
        os.rename(unfinished, folder)


def restore(
    folder: str | pathlib.Path, model: Decoder, *, drafter: Drafter | None = None, tokenizer: Tokenizer | None = None
) -> Engine:
    """The engine that was saved; its unfinished requests are its ``requests``, under their old numbers.

    Args:
        folder: from ``save``.
        model, drafter, tokenizer: the same as then. Other weights, or other options of a drafter or tokenizer, go unnoticed.

    Raises:
        FileNotFoundError: the folder holds no engine.
        ValueError: it was made for another model, drafter, tokenizer or policy, is of another format or damaged; the message
            says what differs.
    """
    folder = pathlib.Path(folder)
    rest, arrays = _read(folder)
    policy = ReplayPolicy(**rest["made_for"]["policy"])
    engine = Engine(model, EngineConfig(**rest["config"]), drafter=drafter, tokenizer=tokenizer, policy=policy)
    for name, value in _made_for(engine).items():
        if rest["made_for"].get(name) != value:
            raise ValueError(f"{folder} was made for {name}={rest['made_for'].get(name)!r}, got {value!r}")
    engine.pool.restore(_unnamed("slots", arrays, engine.pool.sequences, folder))
    row = jax.eval_shape(take, engine.pool.sequences, jnp.int32(0))
    for i, prefix in enumerate(rest["prefixes"]):
        engine.prefixes.store(tuple(prefix), _unnamed(f"prefix{i}", arrays, row, folder))
    engine.next_number = rest["next_number"]
    requests = {r["number"]: _revive(engine, r, row, arrays, folder) for r in rest["requests"]}
    followers = {number for described in rest["requests"] for number in described["followers"]}
    for described in rest["requests"]:
        request = requests[described["number"]]
        if request.number not in followers:
            engine.adopt(request, described["slot"])
        for number in described["followers"]:
            engine.queues.follow(request, requests[number])
    return engine


_KEYS = {"format", "config", "made_for", "next_number", "requests", "prefixes"}
_REQUEST_KEYS = {"number", "prompt", "params", "priority", "state", "slot", "tokens", "logprobs"}
_REQUEST_KEYS |= {"handed_out", "has_memory", "prefix_only", "followers"}


def _read(folder: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Both files. Raises ValueError naming the one that is damaged."""
    path = folder / _REST
    try:
        rest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    form = rest.get("format") if isinstance(rest, dict) else None
    if form not in (2, _FORMAT):
        raise ValueError(f"{path} has format {form}, this version reads 2 and {_FORMAT}")
    requests = [(request, _REQUEST_KEYS, "a request") for request in rest.get("requests") or ()]
    for described, needed, whose in ((rest, _KEYS, "it"), *requests):
        if missing := sorted(needed - (described.keys() if isinstance(described, dict) else set())):
            raise ValueError(f"{path} is damaged: {whose} lacks {', '.join(missing)}")
    if form == 2:
        _name_records(rest)
    try:
        return rest, load_file(folder / _ARRAYS)
    except SafetensorError as error:
        raise ValueError(f"{folder / _ARRAYS} is damaged: {error}") from error


def _name_records(rest: dict[str, Any]) -> None:
    """In format 2 records that a policy did not name were updates, whatever the layer, unless a copy is read."""
    made_for = rest["made_for"]
    policy = made_for.get("policy") if isinstance(made_for, dict) else None
    if isinstance(policy, dict) and policy.get("records") is None and policy.get("readout") == "checkpoint":
        policy["records"] = "update"


def _made_for(engine: Engine) -> dict[str, Any]:
    """What must be the same for an engine's arrays to mean the same."""
    policy = {
        field.name: str(value) if isinstance(value := getattr(engine.policy, field.name), np.dtype) else value
        for field in dataclasses.fields(engine.policy)
    }
    return {
        "model": engine.model_name,
        "drafter": f"{type(engine.drafter).__name__}, {engine.drafter.num_drafts} drafts",
        "tokenizer": None if engine.tokenizer is None else type(engine.tokenizer).__name__,
        "policy": policy,
    }


def _describe(engine: Engine, request: Request) -> dict[str, Any]:
    return {
        "number": request.number,
        "prompt": list(request.prompt),
        "params": dataclasses.asdict(request.params),
        "priority": request.priority,
        "state": request.state.value,
        "slot": engine.slot_of(request),
        "tokens": request.tokens,
        "logprobs": request.logprobs,
        "handed_out": request.handed_out,
        "has_memory": request.memory is not None,
        "prefix_only": request.prefix_only,
        "followers": [fork.number for fork in request.followers],
    }


def _revive(engine: Engine, described: dict[str, Any], row: Any, arrays: dict, folder: pathlib.Path) -> Request:
    params = SamplingParams(**described["params"])
    request = Request(engine, described["number"], tuple(described["prompt"]), params, described["priority"])
    request.restore_answer(described["tokens"], described["logprobs"])
    request.handed_out = tuple(described["handed_out"])
    request.state, request.prefix_only = State(described["state"]), described["prefix_only"]
    if described["has_memory"]:
        request.memory = _unnamed(f"memory{request.number}", arrays, row, folder)
    return request


def _named(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {prefix + jax.tree_util.keystr(path): np.asarray(jax.device_get(leaf), order="C") for path, leaf in leaves}


def _unnamed(prefix: str, arrays: dict[str, np.ndarray], like: Any, folder: pathlib.Path) -> Any:
    """Raises ValueError where an array is missing or of another shape or dtype than ``like`` has."""

    def one(path: Any, leaf: Any) -> np.ndarray:
        name = prefix + jax.tree_util.keystr(path)
        if name not in arrays:
            raise ValueError(f"{folder / _ARRAYS} lacks {name}")
        found = arrays[name]
        if found.shape != leaf.shape or found.dtype != leaf.dtype:
            raise ValueError(
                f"{name} in {folder / _ARRAYS} is {found.dtype} of shape {found.shape}, not {leaf.dtype} of shape {leaf.shape}"
            )
        return found

    return jax.tree_util.tree_map_with_path(one, like)
