"""Fetches the published kernels that benchmarks/peers.py times, into the ignored folder .peers/.

    python benchmarks/fetch_peers.py [--wheels FOLDER] [--mamba2_verify FILE]

Two wheels are downloaded with pip (375 MB, kept in no place) and a few Triton sources are unpacked from them; neither engine is
installed. What those sources import of their engines is replaced by the stubs below. Nothing under .peers/ is committed.

The wheels hold no Triton kernel that verifies drafts of Mamba-2. The reference implementation has one, in
vllm/model_executor/layers/mamba/ops/selective_state_update_replayssm_spec.py of https://github.com/Johnny-Liou/ReplaySSM,
commit 58079ed3884a8cc6308c630e2e755011c64dac1c. Give a copy of that file as --mamba2_verify (a later run keeps it); without
it, that one kernel is not measured.
"""

import argparse
import fnmatch
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PEERS = pathlib.Path(__file__).resolve().parent.parent / ".peers"
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
MAMBA = "vllm/model_executor/layers/mamba/ops"
FLA = "vllm/third_party/flash_linear_attention/ops"
SGLANG = "sglang/kernels/ops/attention"
MAMBA2_VERIFY = f"{MAMBA}/selective_state_update_replayssm_spec.py"

# patterns of what is unpacked from each wheel
FILES = {
    "vllm": [
        *(f"{MAMBA}/{name}.py" for name in ("mamba_ssm", "triton_helpers", "replayssm_config")),
        f"{MAMBA}/selective_state_update_replayssm_output_only.py",
        f"{MAMBA}/configs/selective_state_update/*NVIDIA_H200*.json",
        *(f"{FLA}/{name}.py" for name in ("fused_recurrent", "op", "utils")),
    ],
    "sglang": [
        *(f"{SGLANG}/linear/{name}.py" for name in ("fused_recurrent_linear_replayssm", "gdn_replayssm_spec_decode")),
        *(f"{SGLANG}/linear/{name}.py" for name in ("gdn_replayssm_spec_fold", "kda_replayssm_spec_decode")),
        *(f"{SGLANG}/fla/{name}.py" for name in ("fused_recurrent", "op", "utils")),
    ],
}

# what the unpacked sources import and the benchmark does not need; every other package is an empty __init__.py
STUBS = {
    "vllm/triton_utils.py": """\
import triton
import triton.language as tl
import triton.language.extra.libdevice as tldevice

HAS_TRITON = True
""",
    "vllm/platforms.py": """\
class Platform:
    def __getattr__(self, name):
        return lambda *args, **kwargs: name in ("is_cuda", "is_cuda_alike")


current_platform = Platform()
""",
    "vllm/envs.py": """\
def __getattr__(name):
    return None
""",
    "vllm/logger.py": """\
class Logger:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def init_logger(name):
    return Logger()
""",
    "vllm/_custom_ops.py": "",
    "vllm/utils/platform_utils.py": """\
import torch


def get_device_name_as_file_name():
    return torch.cuda.get_device_name().replace(" ", "_")
""",
    "vllm/v1/attention/backends/utils.py": "PAD_SLOT_ID = -1\nNULL_BLOCK_ID = 0\n",
    "sglang/srt/utils/__init__.py": """\
def is_gfx95_supported():
    return False
""",
    "sglang/srt/utils/common.py": """\
import torch
from packaging import version

torch_release = version.parse(torch.__version__).release
""",
    f"{SGLANG}/kda_packed_decode.py": """\
def covered(*args):
    return False
""",
}


def download(package: str, folder: pathlib.Path) -> pathlib.Path:
    """The wheel of a package for 64-bit Linux and Python 3.12, in ``folder``; downloaded unless it is there."""
    pattern = f"{package}-{VERSIONS[package]}-*.whl"
    if not any(folder.glob(pattern)):
        platforms = [argument for libc in (28, 34, 17) for argument in ("--platform", f"manylinux_2_{libc}_x86_64")]
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--python-version=3.12"]
        command += ["--implementation=cp", *platforms, f"--dest={folder}", f"{package}=={VERSIONS[package]}"]
        subprocess.run(command, check=True)
    return next(folder.glob(pattern))


def unpack(wheel: pathlib.Path, patterns: list[str], target: pathlib.Path) -> list[str]:
    """Unpacks what matches the patterns; every pattern must match something.

    Returns:
        The names of the files.

    Raises:
        FileNotFoundError: a pattern matches nothing in the wheel.
    """
    names: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        for pattern in patterns:
            matching = fnmatch.filter(archive.namelist(), pattern)
            if not matching:
                raise FileNotFoundError(f"{wheel.name} holds nothing like {pattern}")
            archive.extractall(target, matching)
            names += matching
    return names


def write_stubs(target: pathlib.Path) -> None:
    """Writes the stub modules, and an empty __init__.py into every folder that has none."""
    for name, text in STUBS.items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in {parent for path in target.rglob("*.py") for parent in path.relative_to(target).parents}:
        if folder != pathlib.Path("."):
            (target / folder / "__init__.py").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=pathlib.Path, help="keep the wheels in this folder, and take them from it")
    parser.add_argument("--mamba2_verify", type=pathlib.Path, help="a copy of the reference implementation's file")
    options = parser.parse_args()

    given = options.mamba2_verify or PEERS / MAMBA2_VERIFY
    verify = given.read_text() if options.mamba2_verify or given.exists() else None
    shutil.rmtree(PEERS, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels = options.wheels or pathlib.Path(scratch)
        for package, patterns in FILES.items():
            names = unpack(download(package, wheels), patterns, PEERS)
            print(f"{package} {VERSIONS[package]}: {len(names)} files")
    if verify is not None:
        (PEERS / MAMBA2_VERIFY).write_text(verify)
    write_stubs(PEERS)
    (PEERS / "versions.json").write_text(json.dumps(VERSIONS))
    print(f"Mamba-2 verification: {'there' if verify is not None else 'not there (see --help)'}")


if __name__ == "__main__":
    main()
