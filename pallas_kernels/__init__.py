"""GPU kernels of ReplaySSM decoding: arrays in, arrays out. One folder per GPU generation; they import JAX and nothing else."""
