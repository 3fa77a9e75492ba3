"""What a state's precision does to a model's predictions over a long text.

    python -m benchmarks.fidelity.train --family=gdn --minutes=2.5      # and kda; mamba2 for 0.5; to .runs/fidelity
    python -m benchmarks.fidelity --out=benchmarks/results/fidelity_h200.json

The second command feeds the same tokens to a model with a float32 checkpoint and to the same model under every other policy
(``variants``), and reports the KL divergence of their predictions by position: on held-out text, and on a text that the float32
model wrote itself. ``plot`` draws it. See ``measure`` for what is fed how.

The results in ``benchmarks/results`` are of small models that were trained and measured beside others on one GPU; ``notes`` in
the file says which entries are of which weights. Mamba-2 takes the most steps a minute and had 0.5. The two texts of Gated
DeltaNet, and those of Kimi Delta Attention, are of two models each.

A checkpoint that is itself a quantised copy costs more than a copy beside an exact one. Where there is a delta rule it does so
from the first thousand tokens on, and the rest of the text adds at most two fifths. Mamba-2's drifts: from the first 1,024
tokens to the last 8,192 the divergence of an fp8 checkpoint grows by factors of 57 and 68, that of an NVFP4 one by 5 and 6,
that of bfloat16 and float16 ones by up to 2.5, that of copies beside an exact checkpoint by at most a quarter. This is one
model.
"""
