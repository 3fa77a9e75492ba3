"""What a state's precision does to a model's predictions over a long text.

    python -m benchmarks.fidelity.train --family=gdn --minutes=1        # and mamba2, kda; weights to .runs/fidelity
    python -m benchmarks.fidelity --out=benchmarks/results/fidelity_h200.json

The second command feeds the same tokens to a model with a float32 checkpoint and to the same model under every other policy
(``variants``), and reports the KL divergence of their predictions by position: on held-out text, and on a text that the float32
model wrote itself. ``plot`` draws it. See ``measure`` for what is fed how.
"""
